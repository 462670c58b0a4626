"""Graphs as modules, and as functions that torch's inductor compiles; and functions that `torch.compile` leaves alone.

compile_fx, GmWrapper               2.11.0, 2.13.0   a graph compiled to a function that empties its argument, a list
use_static_cuda_launcher            2.11.0, 2.13.0   which launcher compiled kernels have
TracingContext, FakeTensorMode,
ShapeEnv                            2.11.0, 2.13.0   where inductor looks for what it has compiled before
_LazyGraphModule                    2.11.0, 2.13.0   a graph module whose code is made when it is asked for
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

Function = TypeVar("Function", bound=Callable[..., Any])


def graph_module(root: nn.Module | dict[str, nn.Module], graph: fx.Graph, name: str) -> fx.GraphModule:
    """The module of a graph. Its code is made at the first call, or when it is printed."""
    return _LazyGraphModule(root, graph, name)


def inductor(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Compile a graph of aten ops for arguments like these: to a function of a list, which it empties, and in which
    each argument dies at its last use. Kernels are launched by Triton's own launcher: torch's holds the interpreter's
    lock while it waits for a place in the device's queue, and no thread could end a wait that never ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of its own modules as it imports them
        from torch._dynamo.utils import GmWrapper
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

    with _disable_current_modes(), config.patch(use_static_cuda_launcher=False):
        # Inductor keeps what it compiles, for the next process, where a mode says that shapes are numbers.
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fakes = [mode.from_tensor(e, static_shapes=True) if isinstance(e, Tensor) else e for e in examples]
        with tracing(TracingContext(mode)):
            compiled = compile_fx(GmWrapper(module, lambda args: args), fakes)
    return cast(Callable[[list[Any]], Any], compiled)


def uncompiled(function: Function) -> Function:
    """The function as one that an outer `torch.compile` calls and leaves alone."""
    return cast(Function, torch.compiler.disable(function))
