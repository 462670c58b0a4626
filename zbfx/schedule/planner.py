"""From costs to a schedule: `plan` is the planner's front door, `build` turns any order into a checked Schedule."""

from __future__ import annotations

import time
from collections.abc import Sequence

from zbfx.errors import ZbfxError
from zbfx.plan import Action, CostTable, Schedule
from zbfx.schedule.check import check
from zbfx.schedule.handmade import Ranks
from zbfx.schedule.limits import MemLimit, limit_per_rank
from zbfx.schedule.registry import GENERATORS, Generator

Request = str | Generator | Schedule | Sequence[Sequence[Action] | str]


def build(name: str, costs: CostTable, microbatches: int, ranks: Ranks, mem_limit: MemLimit = None) -> Schedule:
    """Check and time `ranks`, and attach the lower bound that holds for these costs and this limit."""
    timed = check(costs, microbatches, ranks, mem_limit)
    limits = limit_per_rank(costs, mem_limit)
    return Schedule(
        name=name,
        costs=costs,
        microbatches=microbatches,
        ranks=tuple(map(tuple, ranks)),
        spans=timed.spans,
        peak_bytes=timed.peak_bytes,
        mem_limit=None if limits is None else tuple(map(float, limits)),
    )


def read_orders(orders: Sequence[Sequence[Action] | str]) -> Ranks:
    """An order per rank, as actions or as text like "F0.0 F0.1 B0.0"."""
    return tuple(
        tuple(Action.parse(word) for word in order.split()) if isinstance(order, str) else tuple(order) for order in orders
    )


def plan(
    costs: CostTable,
    microbatches: int,
    *,
    schedule: Request = "auto",
    mem_limit: MemLimit = None,
    budget_s: float = 5.0,
    seed: int = 0,
) -> Schedule:
    """Order F, B and W of every stage and microbatch on every rank.

    `schedule` is a name, an order per rank (actions, or text like "F0.0 F0.1 B0.0"), a Schedule, or a generator
    `(costs, microbatches) -> orders`. `mem_limit` counts bytes per rank, static bytes included: a number, one number
    per rank, a multiple like "2x" of what 1F1B's activations need, or None.
    """
    begun = time.perf_counter()
    if isinstance(schedule, str):
        name = schedule
        if name not in GENERATORS:
            raise ZbfxError(f"no schedule is called {name!r}; known: {', '.join(sorted(GENERATORS))}")
        ranks = GENERATORS[name](costs, microbatches)
    elif isinstance(schedule, Schedule):
        name, ranks = schedule.name, schedule.ranks
    elif callable(schedule):
        name, ranks = getattr(schedule, "__name__", "generator"), schedule(costs, microbatches)
    else:
        name, ranks = "custom", read_orders(schedule)
    del begun
    return build(name, costs, microbatches, ranks, mem_limit)
