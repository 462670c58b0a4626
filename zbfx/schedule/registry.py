"""Schedules by name. A generator takes (costs, microbatches) and returns one order of actions per rank, nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zbfx.errors import ZbfxError
from zbfx.plan import CostTable
from zbfx.schedule.handmade import Ranks, gpipe, one_f_one_b, require_linear, zb_h1, zb_h2

Generator = Callable[[CostTable, int], Ranks]


@dataclass(frozen=True)
class Searched:
    """A schedule that is searched for under a limit of its own. `require_placement` refuses placements that it does not mean."""

    mem_limit: str | None
    require_placement: Callable[[str, CostTable], None]


def any_placement(name: str, costs: CostTable) -> None:
    """Accept everything."""


def v_placement(ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down the ranks and back up (section 6)."""
    return (*range(ranks), *reversed(range(ranks)))


def require_v(name: str, costs: CostTable) -> None:
    expected = v_placement(len(costs.stages) // 2)
    if costs.placement != expected:
        raise ZbfxError(
            f"{name} puts two stages on each rank in a V: expected placement {expected}, found {costs.placement}"
        )


GENERATORS: dict[str, Generator] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}

SEARCHED: dict[str, Searched] = {
    "zb-1p": Searched("1x", require_linear),
    "zb-2p": Searched("2x", require_linear),
    "zb-v": Searched("1x", require_v),
    "auto": Searched(None, any_placement),
}


def names() -> tuple[str, ...]:
    """Every schedule that can be asked for by name."""
    return (*GENERATORS, *SEARCHED)


def register(name: str) -> Callable[[Generator], Generator]:
    """`@register("mine")` makes a generator available as `schedule="mine"` and to `auto`; a name already taken is replaced."""

    def add(generator: Generator) -> Generator:
        if name in SEARCHED:
            raise ZbfxError(f"{name!r} is a searched schedule and cannot be replaced; register another name")
        GENERATORS[name] = generator
        return generator

    return add
