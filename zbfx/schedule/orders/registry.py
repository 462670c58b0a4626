"""Schedules by name: generators of orders, and schedules that are searched for.

Takes   a name; `register` also a generator `(costs, microbatches) -> orders`.
Gives   the generator, or a `Searched` with the limit and placement that the name stands for.
Raises  `ZbfxError` where a generator would replace a searched schedule.
Source  sections 2, 3 and 6 of the paper for its own schedules.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from zbfx.errors import ZbfxError
from zbfx.plan import CostTable, Number
from zbfx.schedule.orders import handmade, vshape
from zbfx.schedule.orders.handmade import Orders
from zbfx.schedule.orders.vshape import v_placement
from zbfx.schedule.orders.written import read_orders

Generator = Callable[..., Any]  # (costs, microbatches) -> orders, or (costs, microbatches, limits) -> orders
BytesPerRank = Sequence[Number] | None  # bytes per rank, static bytes included


@dataclass(frozen=True)
class Searched:
    """A schedule that is searched for under a limit of its own. `require_placement` raises for a placement that the
    name does not stand for. `seeds` are compared first, however short the time. Integer programs get `program_share` of
    the time, of a large problem `large_program_share`, for they help little there, and after annealing at most
    `annealed_program_share`. `compares`: the schedules of all generators are compared, also where the search meets its
    bound without them."""

    mem_limit: str | None
    require_placement: Callable[[str, CostTable], object] = lambda name, costs: None
    program_share: float = 0.5
    large_program_share: float = 0.1
    annealed_program_share: float = 0.15
    compares: bool = False
    seeds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shape:
    """The placements that a schedule is made for: stages a rank by default, at least, and at most, and where they
    lie."""

    holds: str  # in words
    default: int = 1
    least: int = 1
    most: float = inf
    placement: Callable[[int, int], tuple[int, ...]] = handmade.looped_placement  # (ranks, stages a rank)


ANY = Shape("any number of stages a rank")
LINEAR = Shape("1 stage a rank", most=1)
LOOPED = Shape("2 or more stages a rank", default=2, least=2)
V = Shape(
    "2 stages a rank, down the ranks and back up", default=2, least=2, most=2, placement=lambda p, _: v_placement(p)
)

# By name; of all others, any.
SHAPES: dict[str, Shape] = {
    **dict.fromkeys(("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"), LINEAR),
    **dict.fromkeys(("zb-v", "zb-v-order", "v-half", "v-min"), V),
    "interleaved-1f1b": LOOPED,
}


GENERATORS: dict[str, Generator] = {
    "gpipe": handmade.gpipe,
    "1f1b": handmade.one_f_one_b,
    "zb-h1": handmade.zb_h1,
    "zb-h2": handmade.zb_h2,
    "interleaved-1f1b": handmade.interleaved_1f1b,
    "zb-v-order": vshape.zb_v,
    "v-half": vshape.v_half,
    "v-min": vshape.v_min,
}

SEARCHED: dict[str, Searched] = {
    "zb-1p": Searched("1x", handmade.require_linear, seeds=("1f1b", "zb-h1")),
    "zb-2p": Searched("2x", handmade.require_linear, seeds=("1f1b", "zb-h1", "zb-h2")),
    "zb-v": Searched("1x", vshape.require_v, seeds=("zb-v-order",)),
    "ilp": Searched(None, program_share=0.9, large_program_share=0.9, annealed_program_share=0.9),
    "auto": Searched(None, compares=True),
}


FASTEST_FIRST = ("zb-v-order", "zb-h2", "zb-h1", "interleaved-1f1b", "1f1b", "v-half", "v-min", "gpipe")


def fastest_first(generators: Iterable[str]) -> list[str]:
    """The names of generators, those first whose schedules are shortest where they fit. Those of users lead."""
    place = {name: index for index, name in enumerate(FASTEST_FIRST)}
    return sorted(generators, key=lambda name: place.get(name, -1))


def names() -> tuple[str, ...]:
    """Every schedule that can be asked for by name."""
    return (*GENERATORS, *SEARCHED)


def register(name: str, shape: Shape | None = None) -> Callable[[Generator], Generator]:
    """`@register("mine")` makes a generator `schedule="mine"`, also for `auto`; a name already taken is replaced.
    `shape` says for which placements it is made, so that `compile` cuts the model for them; by default any."""

    def add(generator: Generator) -> Generator:
        if name in SEARCHED:
            raise ZbfxError(f"{name!r} is a searched schedule and cannot be replaced; register another name")
        GENERATORS[name] = generator
        if shape is not None:
            SHAPES[name] = shape
        return generator

    return add


def letters_of(generate: Generator) -> Callable[[CostTable, int], list[list[vshape.Letter]]] | None:
    """What makes, per rank, the kinds and stages of a generator's orders, each of which runs the microbatches in
    ascending order; None where that is not known."""
    return vshape.zb_v_letters if generate is vshape.zb_v else None


def generated(generate: Generator, costs: CostTable, microbatches: int, limits: BytesPerRank) -> Orders:
    """The orders that a generator makes. One that does not go without a third argument is given the limits."""
    try:
        takes_two = inspect.signature(generate).bind(costs, microbatches) is not None
    except TypeError:
        takes_two = False
    return read_orders(generate(costs, microbatches) if takes_two else generate(costs, microbatches, limits))


@dataclass(frozen=True)
class Improve:
    """A request: search from this schedule, a name, orders, a `Schedule` or a generator. Made by `improve`."""

    start: Any


def improve(start: Any) -> Improve:
    """`schedule=improve(mine)` searches as "auto" does, from a schedule of your own: a name, an order per rank, a
    `Schedule`, or a generator. The result costs no more than `mine`, where `mine` fits the memory limit."""
    return Improve(start)


def is_searched(request: object) -> bool:
    """Whether a request for a schedule leaves the order to the search."""
    return isinstance(request, Improve) or (isinstance(request, str) and request in SEARCHED)
