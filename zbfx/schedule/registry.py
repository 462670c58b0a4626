"""Schedules by name. A generator takes (costs, microbatches) and returns one order of actions per rank, nothing more."""

from __future__ import annotations

from collections.abc import Callable

from zbfx.plan import CostTable
from zbfx.schedule.handmade import Ranks, gpipe, one_f_one_b, zb_h1, zb_h2

Generator = Callable[[CostTable, int], Ranks]

GENERATORS: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}


def register(name: str) -> Callable[[Generator], Generator]:
    """`@register("mine")` makes a generator available as `schedule="mine"`; a name already taken is replaced."""

    def add(generator: Generator) -> Generator:
        GENERATORS[name] = generator
        return generator

    return add
