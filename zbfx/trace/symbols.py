"""Sizes of a microbatch that are symbols while it is traced, and numbers afterwards.

The tracer writes down what it assumes about the symbols (guards). Numbers that meet the guards may take the place of
the symbols: the graph is then the one that tracing with these numbers would give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from zbfx._torch.fakes import FakeTensorMode, shape_env, size_guards, symbolic_size
from zbfx.errors import ZbfxError
from zbfx.passes.sizes import SYMBOLIC, Size, size_of
from zbfx.trace.signature import Signature, TensorSpec

Dimension = tuple[int, int]  # the index of a tensor of the microbatch, and of one of its dimensions
Shapes = Sequence[tuple[int, ...]]


class GuardBroken(ZbfxError):
    """A graph that was traced with symbols does not hold for these sizes."""


class Sizes:
    """A symbol for each group of dimensions. In the microbatch that is traced, those of a group have one size."""

    def __init__(self, signature: Signature, groups: Sequence[Sequence[Dimension]]) -> None:
        self.signature, self.groups = signature, [tuple(group) for group in groups]
        self.env = shape_env()
        self.ints: dict[Dimension, torch.SymInt] = {}
        self.symbols: list[sympy.Symbol] = []
        for group in self.groups:
            index, dim = group[0]
            symbol = symbolic_size(self.env, self.name(group[0]), signature.tensors[index].shape[dim])
            self.ints |= dict.fromkeys(group, symbol)
            self.symbols.append(symbol.node.expr)

    def name(self, dimension: Dimension) -> str:
        """A dimension in the words of messages: `inputs[0].shape[1]`."""
        return f"{self.signature.tensors[dimension[0]].name}.shape[{dimension[1]}]"

    def layout(self, index: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The shape and strides of a tensor of the microbatch, with symbols in them."""
        spec = self.signature.tensors[index]
        shape = tuple(self.ints.get((index, dim), size) for dim, size in enumerate(spec.shape))
        return shape, strides_like(spec, shape)

    def fixed(self) -> set[Dimension]:
        """The dimensions for which the graph holds at one size alone."""
        known = self.env.replacements
        return {
            dimension
            for group, symbol in zip(self.groups, self.symbols, strict=True)
            if isinstance(known.get(symbol), sympy.Integer)
            for dimension in group
        }

    def values(self, shapes: Shapes) -> dict[sympy.Symbol, int]:
        """The number of each symbol for these shapes. Raises `GuardBroken` where the graph does not hold."""
        values: dict[sympy.Symbol, int] = {}
        pairs = list(zip(self.groups, self.symbols, strict=True))
        for group, symbol in pairs:
            found = {shapes[index][dim] for index, dim in group}
            if len(found) > 1:
                names = " and ".join(map(self.name, group))
                raise GuardBroken(f"{names} had one size when they were traced; found {sorted(found)}")
            values[symbol] = found.pop()
        named = {symbol: sympy.Symbol(self.name(group[0])) for group, symbol in pairs}
        for guard in size_guards(self.env):
            if guard.xreplace(values) != sympy.true:
                numbers = ", ".join(f"{named[symbol]} = {number}" for symbol, number in values.items())
                raise GuardBroken(f"the graph that was traced holds for {guard.xreplace(named)}; found {numbers}")
        return values


def strides_like(spec: TensorSpec, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Dense strides for `shape`, with its dimensions in the order in which those of the example lie in memory."""
    order = sorted(range(len(shape)), key=lambda dim: (spec.stride[dim], -dim))
    strides: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def changed_dimensions(signature: Signature, shapes: Shapes) -> list[list[Dimension]]:
    """The dimensions in which these shapes differ from the example's, in groups with one old and one new size. Raises
    `GuardBroken` for a tensor with another number of dimensions."""
    groups: dict[tuple[int, int], list[Dimension]] = {}
    for index, (spec, shape) in enumerate(zip(signature.tensors, shapes, strict=True)):
        if len(spec.shape) != len(shape):
            raise GuardBroken(f"{spec.name} had {len(spec.shape)} dimensions in the example; found {len(shape)}")
        for dim, (before, after) in enumerate(zip(spec.shape, shape, strict=True)):
            if before != after:
                groups.setdefault((before, after), []).append((index, dim))
    return list(groups.values())


class Numbers:
    """Puts numbers in the place of symbols, in sizes, in fake tensors, and in tuples and lists of them."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self.given = values
        self.mode = FakeTensorMode()
        self.known: dict[Any, Any] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, SYMBOLIC):
            value = size_of(value)
        if isinstance(value, Size):
            return self.number(value.expression, value.kind)
        if isinstance(value, sympy.Expr):
            return self.number(value, int)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, tuple | list):
            return type(value)(map(self, value))
        return value

    def number(self, expression: sympy.Basic, kind: type) -> Any:
        key = (expression, kind)
        if key not in self.known:
            self.known[key] = kind(expression.xreplace(self.given))
        return self.known[key]

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """A fake tensor of these sizes. Equal ones are one object, as nothing is ever written into them."""
        shape, stride = value.shape, value.stride()
        if all(type(size) is int for size in (*shape, *stride)):
            return value
        key = (tuple(map(self, shape)), tuple(map(self, stride)), value.dtype, value.device)
        if key not in self.known:
            with self.mode:
                self.known[key] = torch.empty_strided(key[0], key[1], dtype=key[2], device=key[3])
        return self.known[key]
