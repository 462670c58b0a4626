"""Few lengths for steps of unlike microbatches, so that compiled code is made for few shapes.

In: the microbatches of a call. Out: the same, padded to the next length of a policy. What is appended is the user's to
say: the loss must ignore it. That it does is compared once, on the first call that appends something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, isfinite, log2
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zbfx.arguments import kind_of, whole_number
from zbfx.compiled import Compiled
from zbfx.errors import InputError, ZbfxError, listed
from zbfx.trace.signature import Signature

QUARTERS = 4  # lengths between a power of two and the next
MULTIPLE = 8  # of which lengths are, for tensor cores
LOSS_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative, of losses with and without padding
HALF_TOLERANCE = 1e-2
PADDED = (
    "a dict from a tensor's name to (dimension, value), or to a list of these, like "
    '{"inputs[0]": (1, 0), "targets[0]": (1, -100)}'
)


def quarter_power(length: int, base: int = 64) -> int:
    """The next of base times 2**(k/4), each as the next multiple of 8: at most a fifth longer, or 8."""
    power = ceil(QUARTERS * log2(length / base) - 1e-9)
    below, above = (MULTIPLE * ceil(base * 2 ** (k / QUARTERS) / MULTIPLE) for k in (power - 1, power))
    return below if below >= length else above


@dataclass(frozen=True)
class Buckets:
    """How microbatches of `run_split` and `evaluate_split` are padded.

    pad      by name of a tensor ("inputs[0]", "targets[0]", a keyword argument's name): (dimension, value), what is
             appended to it, along which dimension; also a list of these, for a mask with two. Token ids get any value
             where attention is causal; labels what the loss ignores; attention masks 0. All named tensors of a
             microbatch grow by as much as the first one
    rounded  from a length of the first named tensor to that of its bucket; None: with a compiled backend the next
             `base` times 2**(k/4), as a multiple of 8, else no padding
    most     no length is rounded beyond this one: the longest that the model takes

    A model that writes buffers (batch norm) is refused: they would hold what was appended. Random numbers (dropout) are
    drawn for padded shapes."""

    pad: Mapping[str, tuple[int, Any] | list[tuple[int, Any]]]
    rounded: Callable[[int], int] | None = None
    base: int = 64
    most: int | None = None

    def check(self, pipe: Compiled) -> None:
        """Raises `ZbfxError` where such padding cannot be right."""
        specs = {spec.name: spec for spec in pipe.signature.tensors}
        self.check_lengths()
        if not isinstance(self.pad, Mapping):
            raise ZbfxError(f"Buckets(pad=...) is {PADDED}; found {kind_of(self.pad)}")
        if not self.pad or not specs.keys() >= self.pad.keys():
            raise ZbfxError(
                f"Buckets(pad=...) names tensors of a microbatch: {listed(specs)}; found {listed(self.pad) or 'none'}"
            )
        for name in self.pad:
            ways = self.ways(name)
            if not ways or not all(is_way(way) for way in ways):
                raise ZbfxError(f"Buckets(pad=...) is {PADDED}; found {self.pad[name]!r} for {name}")
            for dim, value in ways:
                if not can_hold(specs[name].dtype, value):
                    raise ZbfxError(
                        f"Buckets appends to {name} a number that {specs[name].dtype} holds; found {value!r}. Give one "
                        f"that the loss and attention ignore"
                    )
                if not 0 <= dim < len(specs[name].shape) or dim == specs[name].batch_dim:
                    raise ZbfxError(
                        f"Buckets pads {name} along a dimension of its shape {specs[name].shape}, from 0, that is not "
                        f"its batch's; found {dim}"
                    )
        written = {name for stage in pipe.stages for phase in stage.phases.values() for name in phase.updates}
        if written:
            raise ZbfxError(
                f"the forward writes {listed(sorted(map(str, written)))}, which would hold what Buckets appends: leave "
                f"buckets out, or freeze these buffers (eval mode, when the pipeline is compiled)"
            )

    def check_lengths(self) -> None:
        whole_number("Buckets(base=...)", self.base, "the length from which lengths are counted in powers of 2**(1/4)")
        if self.most is not None:
            whole_number("Buckets(most=...)", self.most, "the longest length that the model takes, or None")
        if self.rounded is not None and not callable(self.rounded):
            raise ZbfxError(
                f"Buckets(rounded=...) is a function from a length to one that is no less, or None; found "
                f"{kind_of(self.rounded)}"
            )

    def may_pad(self, compiles: bool) -> bool:
        return self.rounded is not None or compiles

    def ways(self, name: str) -> list[tuple[int, Any]]:
        found = self.pad[name]
        return found if isinstance(found, list) else [found]

    def added(self, length: int, compiles: bool) -> int:
        """By how much a microbatch of such a length grows."""
        if not length or not self.may_pad(compiles):
            return 0
        to = quarter_power(length, self.base) if self.rounded is None else self.rounded(length)
        if self.most is not None:
            to = max(length, min(to, self.most))
        if not isinstance(to, int) or to < length:
            raise InputError(f"Buckets(rounded=...) gives a whole number that is no less: found {to!r} for {length}")
        return to - length

    def growth(self, signature: Signature, call: Any, compiles: bool) -> int:
        """By how much a microbatch grows. Raises `InputError` where it has other dimensions."""
        named = dict(zip((spec.name for spec in signature.tensors), signature.flatten(*call), strict=True))
        for name in self.pad:
            if named[name].ndim <= max(dim for dim, _ in self.ways(name)):
                raise InputError(f"Buckets pads {name} along {self.ways(name)}; found shape {tuple(named[name].shape)}")
        first = next(iter(self.pad))
        return self.added(named[first].shape[self.ways(first)[0][0]], compiles)

    def padded(self, signature: Signature, call: Any, compiles: bool) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """A microbatch, as long as its bucket."""
        added = self.growth(signature, call, compiles)
        named = dict(zip((spec.name for spec in signature.tensors), signature.flatten(*call), strict=True))
        for name in self.pad if added else ():
            for dim, value in self.ways(name):
                named[name] = appended(named[name], dim, added, value)
        return signature.unflatten(list(named.values()))


def is_way(way: object) -> bool:
    """Whether this is a (dimension, value)."""
    return isinstance(way, tuple) and len(way) == 2 and isinstance(way[0], int) and not isinstance(way[0], bool)


def can_hold(dtype: torch.dtype, value: object) -> bool:
    """Whether a tensor of this dtype can have this element."""
    if not isinstance(value, int | float):
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return True
    return isinstance(value, int) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def appended(tensor: Tensor, dim: int, count: int, value: Any) -> Tensor:
    after = (0, 0) * (tensor.ndim - 1 - dim) + (0, count)
    return F.pad(tensor, after, value=value)


def refuse_padding(plain: Tensor, padded: Tensor, dtypes: set[torch.dtype]) -> None:
    """Raises `InputError` if padding has changed a loss by more than rounding in the least precise of these dtypes."""
    tolerance = max((LOSS_TOLERANCE.get(dtype, HALF_TOLERANCE) for dtype in dtypes), default=HALF_TOLERANCE)
    before, after = float(plain), float(padded)
    if not isfinite(before) and not isfinite(after):
        return
    if not abs(before - after) <= tolerance * max(abs(before), abs(after), 1e-6):
        raise InputError(
            f"padding changes the loss: {before:.8g} for a microbatch as it is, {after:.8g} for the same "
            f"one as Buckets pads it. Give values that the loss and attention ignore (a label like -100, a mask of 0), "
            f"or leave buckets out"
        )
