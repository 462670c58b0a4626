"""Fake tensors, which have shape, dtype and device but no memory, and sizes that are symbols.

FakeTensorMode, FakeTensor          2.11.0, 2.13.0   tensors with shape, dtype and device but no memory
FunctionalTensor                    2.11.0, 2.13.0   tensors whose in-place writes leave what is under them alone
ShapeEnv, ConstantSource            2.11.0, 2.13.0   sizes that are symbols, and what holds of them
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, fake_tensor.FakeTensor)


def is_constant(tensor: Tensor) -> bool:
    """Whether a tensor has values under the tracer."""
    return not isinstance(tensor, fake_tensor.FakeTensor | FunctionalTensor)


def fake_strided(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A fake tensor of this layout, on a storage of its own, made without the dispatcher, which is slow."""
    base = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if offset:
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        base = torch.empty(offset + max(extent, 0), dtype=dtype, device="meta").as_strided(shape, stride, offset)
    return fake_tensor.FakeTensor(mode, base, device)


def shape_env() -> ShapeEnv:
    """Where the tracer keeps symbols; sizes that depend on values of tensors are refused as they are without it."""
    return ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False)


def symbolic_size(env: ShapeEnv, name: str, value: int) -> torch.SymInt:
    """A size that is a symbol, and `value` in the shapes that are traced."""
    source = ConstantSource(name)
    symbol = env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=value, source=source)
    assert isinstance(size, torch.SymInt), "a symbol, not a number"
    return size


def size_guards(env: ShapeEnv) -> list[sympy.Basic]:
    """What must hold of the symbols for the graph to hold."""
    guards: list[sympy.Basic] = [guard.expr for guard in env.guards]
    guards += [sympy.Eq(symbol, value) for symbol, value in env.replacements.items()]
    for symbol, limits in env.var_to_range.items():
        guards += [limit for limit in (symbol >= limits.lower, symbol <= limits.upper) if limit is not sympy.true]
    return guards
