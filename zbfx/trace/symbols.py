"""Sizes of a microbatch that are symbols while it is traced, and numbers afterwards.

The tracer writes down what it took for granted about the symbols (guards). Numbers that keep the guards may be put in
place of the symbols: the graph is then the one that tracing with these numbers would give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from zbfx import _torch
from zbfx.errors import ZbfxError
from zbfx.passes.sizes import SYMBOLIC, Size, size_of
from zbfx.trace.signature import Signature, TensorSpec

Place = tuple[int, int]  # a tensor of the microbatch, by its position, and a dimension of it
Shapes = Sequence[tuple[int, ...]]


class GuardBroken(ZbfxError):
    """Sizes for which a graph traced with symbols does not hold."""


class Sizes:
    """One symbol for each group of places, which have one size in the microbatch that is traced."""

    def __init__(self, signature: Signature, groups: Sequence[Sequence[Place]]) -> None:
        self.signature, self.groups = signature, [tuple(group) for group in groups]
        self.env = _torch.shape_env()
        self.ints: dict[Place, torch.SymInt] = {}
        self.symbols: list[sympy.Symbol] = []
        for group in self.groups:
            index, dim = group[0]
            symbol = _torch.symbolic_size(self.env, self.name(group[0]), signature.tensors[index].shape[dim])
            self.ints |= dict.fromkeys(group, symbol)
            self.symbols.append(symbol.node.expr)

    def name(self, place: Place) -> str:
        return f"{self.signature.tensors[place[0]].name}.shape[{place[1]}]"

    def layout(self, index: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Shape and strides of a tensor of the microbatch, with symbols."""
        spec = self.signature.tensors[index]
        shape = tuple(self.ints.get((index, dim), size) for dim, size in enumerate(spec.shape))
        return shape, strides_like(spec, shape)

    def fixed(self) -> set[Place]:
        """The places whose size the tracer has taken for a number."""
        known = self.env.replacements
        return {
            place
            for group, symbol in zip(self.groups, self.symbols, strict=True)
            if isinstance(known.get(symbol), sympy.Integer)
            for place in group
        }

    def values(self, shapes: Shapes) -> dict[sympy.Symbol, int]:
        """The number of each symbol for a microbatch of these shapes. Raises `GuardBroken`."""
        values: dict[sympy.Symbol, int] = {}
        for group, symbol in zip(self.groups, self.symbols, strict=True):
            found = {shapes[index][dim] for index, dim in group}
            if len(found) > 1:
                names = " and ".join(map(self.name, group))
                raise GuardBroken(f"{names} had one size when they were traced; found {sorted(found)}")
            values[symbol] = found.pop()
        named = {
            symbol: sympy.Symbol(self.name(group[0])) for group, symbol in zip(self.groups, self.symbols, strict=True)
        }
        for guard in _torch.size_guards(self.env):
            if guard.xreplace(values) != sympy.true:
                numbers = ", ".join(f"{named[symbol]} = {number}" for symbol, number in values.items())
                raise GuardBroken(f"the graph that was traced holds for {guard.xreplace(named)}; found {numbers}")
        return values


def strides_like(spec: TensorSpec, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Dense strides for `shape`, its dimensions in memory in the order of the example's."""
    order = sorted(range(len(shape)), key=lambda dim: (spec.stride[dim], -dim))
    strides: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def changed(signature: Signature, shapes: Shapes) -> list[list[Place]]:
    """The places where these shapes differ from the example's, those that changed alike together."""
    groups: dict[tuple[int, int], list[Place]] = {}
    for index, (spec, shape) in enumerate(zip(signature.tensors, shapes, strict=True)):
        if len(spec.shape) != len(shape):
            raise GuardBroken(f"{spec.name} had {len(spec.shape)} dimensions in the example; found {len(shape)}")
        for dim, (before, after) in enumerate(zip(spec.shape, shape, strict=True)):
            if before != after:
                groups.setdefault((before, after), []).append((index, dim))
    return list(groups.values())


class Numbers:
    """Puts numbers in place of symbols: in sizes, in tensors, in nests of them."""

    def __init__(self, values: Mapping[sympy.Symbol, int]) -> None:
        self.given = values
        self.mode = _torch.FakeTensorMode()
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
        """A fake tensor of these sizes; equal ones are one, since nothing is ever written into them."""
        shape, stride = value.shape, value.stride()
        if all(type(size) is int for size in (*shape, *stride)):
            return value
        key = (tuple(map(self, shape)), tuple(map(self, stride)), value.dtype, value.device)
        if key not in self.known:
            with self.mode:
                self.known[key] = torch.empty_strided(key[0], key[1], dtype=key[2], device=key[3])
        return self.known[key]
