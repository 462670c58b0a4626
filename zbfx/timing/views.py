"""Orders and times of one rank as arrays; an `Action` or a `Span` is made when it is asked for.

Takes   arrays: codes of actions as in `Instance`, seconds.
Gives   sequences that are equal to, and print like, tuples of the same entries. A step of a thousand ranks has
        millions of actions: 4 bytes each as a code, 16 for its times.
Raises  nothing. Source: ours.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from zbfx.plan import Action, Kind, Span

KINDS = (Kind.F, Kind.B, Kind.W, Kind.BW)  # by the kind part of a code

Made = TypeVar("Made")


class View(Sequence[Made], Generic[Made]):
    """A sequence whose entries are made when asked for. Slices are tuples."""

    __slots__ = ()

    @abstractmethod
    def made(self, places: range) -> Iterator[Made]:
        """The entries at these places."""

    @overload
    def __getitem__(self, place: int) -> Made: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Made, ...]: ...
    def __getitem__(self, place: int | slice) -> Made | tuple[Made, ...]:
        found = range(len(self))[place]
        return next(self.made(range(found, found + 1))) if isinstance(found, int) else tuple(self.made(found))

    def __iter__(self) -> Iterator[Made]:
        return self.made(range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, View | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class ActionView(View[Action]):
    """One rank's order. `codes`: as in an `Instance` of so many stages and microbatches."""

    __slots__ = ("codes", "microbatches", "stage_count")

    def __init__(self, codes: Sequence[int] | NDArray[Any], stage_count: int, microbatches: int) -> None:
        self.codes: NDArray[np.int32] = np.asarray(codes, dtype=np.int32)
        self.stage_count, self.microbatches = stage_count, microbatches

    def __len__(self) -> int:
        return len(self.codes)

    def made(self, places: range) -> Iterator[Action]:
        count, m = self.stage_count, self.microbatches
        for code in entries_at(self.codes, places):
            group, microbatch = divmod(code, m)
            kind, stage = divmod(group, count)
            yield Action(KINDS[kind], stage, microbatch)


def in_ascending_order(letters: Sequence[tuple[Kind, int]], stage_count: int, microbatches: int) -> ActionView:
    """The order of these kinds and stages in which each runs its microbatches in ascending order. What goes beyond the
    last microbatch is left out."""
    groups = {letter: KINDS.index(letter[0]) * stage_count + letter[1] for letter in set(letters)}
    row = np.array([groups[letter] for letter in letters], dtype=np.int64)
    codes = np.full(len(row), -1, dtype=np.int64)
    for group in groups.values():
        places = np.flatnonzero(row == group)[:microbatches]
        codes[places] = group * microbatches + np.arange(len(places))
    return ActionView(codes[codes >= 0], stage_count, microbatches)


class SpanView(View[Span]):
    """One rank's actions with their times in seconds."""

    __slots__ = ("actions", "ends_s", "starts_s")

    def __init__(self, actions: ActionView, starts_s: NDArray[np.float64], ends_s: NDArray[np.float64]) -> None:
        self.actions, self.starts_s, self.ends_s = actions, starts_s, ends_s

    def __len__(self) -> int:
        return len(self.actions)

    def made(self, places: range) -> Iterator[Span]:
        times = zip(entries_at(self.starts_s, places), entries_at(self.ends_s, places), strict=True)
        for action, (start_s, end_s) in zip(self.actions.made(places), times, strict=True):
            yield Span(action, start_s, end_s)


def entries_at(array: NDArray[Any], places: range) -> list[Any]:
    """The entries at these places, as numbers of Python."""
    found: list[Any] = array[places.start : places.stop].tolist() if places.step == 1 else array[list(places)].tolist()
    return found
