"""From costs to a schedule: `plan` finds orders, `build` makes a checked `Schedule` of given orders.

Takes   cost tables, a number of microbatches, a memory limit, and a schedule: a name, orders, a `Schedule`, or a
        generator.
Gives   a `Schedule`: orders, times, memory, a lower bound, and notes on what was compared.
Raises  `InvalidSchedule` for incorrect orders, `NoFeasibleSchedule` for a limit that none meets, else `ZbfxError`.
Source  section 3 of the paper.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction

from zbfx.errors import ZbfxError
from zbfx.plan import Action, CostTable, Kind, Number
from zbfx.schedule.bounds.certificate import Certificate
from zbfx.schedule.integer.solver import solvers
from zbfx.schedule.orders.handmade import Orders
from zbfx.schedule.orders.registry import GENERATORS, SEARCHED, Generator, names
from zbfx.schedule.schedule import Schedule
from zbfx.schedule.search.order_search import OrderSearch
from zbfx.schedule.search.refine import refine_search
from zbfx.timing.exact import exact
from zbfx.timing.limits import MemLimit, limit_per_rank, require_feasible
from zbfx.timing.validity import check

MOST_ACTIONS_OF_SMALL = 1000  # up to so many Fs, Bs and Ws a problem is small

ScheduleRequest = str | Generator | Schedule | Sequence[Sequence[Action | str] | str]


def plan(
    costs: CostTable | Sequence[CostTable],
    microbatches: int,
    *,
    schedule: ScheduleRequest = "auto",
    mem_limit: MemLimit = None,
    budget_s: float = 5.0,
    rounds: int | None = None,
    seed: int = 0,
) -> Schedule:
    """Order F, B and W of every stage and microbatch on every rank.

    `costs` may be several tables that differ in placement; the best schedule over all of them is returned. `schedule`
    is a name, an order per rank (actions, or text like "F0.0 F0.1 B0.0"), a Schedule, or a generator
    `(costs, microbatches) -> orders`. `mem_limit` counts bytes per rank, static bytes included: a number, text like
    "24GiB", one of them per rank, a multiple like "2x" of what 1F1B's activations need, or None. Searches stop when the
    lower bound is met or after `budget_s`. `seed` fixes the way that a search takes, the clock how far it comes.
    `rounds` of local search, then without integer programs, also fix how far, unless `budget_s` is over before."""
    begun = time.perf_counter()
    tables = [costs] if isinstance(costs, CostTable) else list(costs)
    if not tables:
        raise ZbfxError("plan needs a cost table; found an empty sequence")
    candidates, refusals = [], []
    for index, table in enumerate(tables):
        share_s = (begun + budget_s - time.perf_counter()) / (len(tables) - index)
        try:
            candidates.append(_plan_one(table, microbatches, schedule, mem_limit, share_s, rounds, seed))
        except ZbfxError as refusal:
            refusals.append(refusal)
    if not candidates:
        raise refusals[0]
    best = min(candidates, key=lambda found: found.iteration_s)
    notes = best.notes
    if len(tables) > 1:
        compared = [
            f"placement {_short(c.costs.placement)}: iteration time {c.iteration_s:g}, bubble rate {c.bubble_rate:.4f}"
            for c in candidates
        ]
        notes = (*compared, *(f"not possible: {str(refusal).splitlines()[0]}" for refusal in refusals), *notes)
    return replace(best, search_s=time.perf_counter() - begun, notes=notes)


def build(name: str, costs: CostTable, microbatches: int, ranks: Orders, mem_limit: MemLimit = None) -> Schedule:
    """Check and time `ranks`, and attach the lower bound that holds for these costs and this limit."""
    timed = check(costs, microbatches, ranks, mem_limit)
    limits = limit_per_rank(costs, mem_limit)
    bound = Certificate(costs, microbatches, limits).seconds
    schedule = Schedule(
        name=name,
        costs=costs,
        microbatches=microbatches,
        ranks=tuple(map(tuple, ranks)),
        spans=timed.spans,
        peak_bytes=timed.peak_bytes,
        mem_limit=None if limits is None else tuple(map(float, limits)),
    )
    # Equal as fractions must be equal as floats: a gap of 0 means proven optimal.
    optimal = Fraction(timed.iteration_ticks, timed.ticks_per_s) == bound
    return replace(schedule, lower_bound_s=schedule.iteration_s if optimal else float(bound))


def read_orders(orders: Sequence[Sequence[Action | str] | str]) -> Orders:
    """The orders in a list with one entry per rank: actions, text like "F0.0 F0.1 B0.0", or a list of both. Raises
    `ZbfxError` for anything else."""
    if isinstance(orders, str) or not isinstance(orders, Sequence):
        raise ZbfxError(f"a schedule gives one order of actions per rank, in a list; found {type(orders).__name__}")
    return tuple(map(read_order, orders))


def read_order(order: Sequence[Action | str] | str) -> tuple[Action, ...]:
    if isinstance(order, str):
        return tuple(map(Action.parse, order.split()))
    if not isinstance(order, Sequence):
        raise ZbfxError(f"an order is a list of actions, or text like 'F0.0 F0.1 B0.0'; found {order!r}"[:200])
    return tuple(action for entry in order for action in read_actions(entry))


def read_actions(entry: Action | str) -> tuple[Action, ...]:
    if isinstance(entry, str):
        return read_order(entry)
    if not isinstance(entry, Action) or not isinstance(entry.kind, Kind):
        raise ZbfxError(f"an order is made of actions, or of text like 'F0.3'; found {entry!r}"[:200])
    return (entry,)


def _plan_one(
    costs: CostTable,
    microbatches: int,
    schedule: ScheduleRequest,
    mem_limit: MemLimit,
    budget_s: float,
    rounds: int | None,
    seed: int,
) -> Schedule:
    if isinstance(schedule, str):
        if schedule in GENERATORS:
            return build(schedule, costs, microbatches, GENERATORS[schedule](costs, microbatches), mem_limit)
        if schedule in SEARCHED:
            return _search(schedule, costs, microbatches, mem_limit, budget_s, rounds, seed)
        close = get_close_matches(schedule.lower().replace("_", "-"), names(), n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ";"
        raise ZbfxError(f"no schedule is called {schedule!r}{meant} Known: {', '.join(names())}")
    if isinstance(schedule, Schedule):
        return build(schedule.name, costs, microbatches, schedule.ranks, mem_limit)
    if callable(schedule):
        orders = read_orders(schedule(costs, microbatches))
        return build(getattr(schedule, "__name__", "generated"), costs, microbatches, orders, mem_limit)
    return build("custom", costs, microbatches, read_orders(schedule), mem_limit)


def _search(
    name: str, costs: CostTable, microbatches: int, mem_limit: MemLimit, budget_s: float, rounds: int | None, seed: int
) -> Schedule:
    """Search under the tighter of the user's limit and the schedule's own, then refine by integer programs."""
    deadline_s = time.perf_counter() + budget_s
    wanted = SEARCHED[name]
    wanted.require_placement(name, costs)
    limits = _tighter(limit_per_rank(costs, mem_limit), limit_per_rank(costs, wanted.mem_limit))
    require_feasible(costs, limits)
    small = 3 * len(costs.stages) * microbatches <= MOST_ACTIONS_OF_SMALL
    program_share = wanted.program_share if small else wanted.large_program_share
    programs = rounds is None and bool(solvers())
    program_s = program_share * budget_s if programs else 0.0
    search = OrderSearch(costs, microbatches, limits, seed, deadline_s - program_s, rounds)
    search.lead()
    compared = []
    if wanted.compares or search.running():
        for other, generate in GENERATORS.items():
            try:
                compared.append(search.compare(other, generate(costs, microbatches)))
            except ZbfxError as refusal:
                compared.append(f"{other}: {str(refusal).splitlines()[0]}")
    search.try_fused()
    search.run()
    if programs:
        refine_search(search, deadline_s)
    search.fuse()
    found = search.result()
    schedule = build(name, costs, microbatches, found.ranks, limits)
    proven = found.cost_s == found.bound_s
    return replace(
        schedule,
        lower_bound_s=schedule.iteration_s if proven else max(schedule.lower_bound_s, float(found.bound_s)),
        notes=(*compared, *found.notes),
    )


def _tighter(one: Sequence[Number] | None, other: Sequence[Number] | None) -> tuple[Number, ...] | None:
    if one is None or other is None:
        return tuple(one or other or ()) or None
    return tuple(min(a, b, key=exact) for a, b in zip(one, other, strict=True))


def _short(placement: Sequence[int]) -> str:
    return " ".join(map(str, placement)) if len(placement) <= 16 else " ".join(map(str, placement[:16])) + " ..."
