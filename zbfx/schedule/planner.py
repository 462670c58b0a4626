"""From costs to a schedule: `plan` finds orders, `build` makes a checked `Schedule` of given orders.

Takes   cost tables, a number of microbatches, a memory limit, and a schedule: a name, orders, a `Schedule`, or a
        generator.
Gives   a `Schedule`: orders, times, memory, a lower bound, and notes on what was compared.
Raises  `InvalidSchedule` for incorrect orders, `NoFeasibleSchedule` for a limit that none meets, else `ZbfxError`.
Source  section 3 of the paper.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any

from zbfx.errors import WrongPlacement, ZbfxError
from zbfx.plan import Action, CostTable, Number, require_size
from zbfx.schedule.bounds.certificate import Certificate
from zbfx.schedule.integer.solver import solvers
from zbfx.schedule.orders.handmade import Orders
from zbfx.schedule.orders.registry import (
    GENERATORS,
    SEARCHED,
    Generator,
    Improve,
    fastest_first,
    generated,
    letters_of,
    names,
)
from zbfx.schedule.orders.written import read_orders
from zbfx.schedule.schedule import Schedule
from zbfx.schedule.search.fusing import evaluated, one_by_one
from zbfx.schedule.search.large import RULES_BETWEEN, LargeSearch, large_rules
from zbfx.schedule.search.order_search import OrderSearch
from zbfx.schedule.search.refine import refine_search
from zbfx.timing.exact import exact, instance, on_common_tick
from zbfx.timing.limits import MemLimit, limit_per_rank, require_feasible
from zbfx.timing.validity import check
from zbfx.timing.views import in_ascending_order

LEAST_ACTIONS_OF_LARGE = 60_000  # of more, a list schedule takes so long that few can be tried
TIMED_PART = 32  # by so much is the problem on which a pass is timed
MOST_ACTIONS_OF_SMALL = 1000  # up to so many Fs, Bs and Ws a problem is small

FROM_A_START = "auto"  # the search that improves a schedule of the user's

ScheduleRequest = str | Generator | Schedule | Improve | Iterable[Iterable[Action | str] | str]


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
    is a name, an order per rank (actions, or text like "F0.0 F0.1 B0.0"), a Schedule, a generator
    `(costs, microbatches) -> orders`, also `(costs, microbatches, limits)` with the bytes per rank or None, or
    `improve` of one of these. `mem_limit` counts bytes per rank, static bytes included: a number, text like
    "24GiB", one of them per rank, a multiple like "2x" of what 1F1B's activations need, or None. Searches stop when the
    lower bound is met or after `budget_s`. `seed` fixes the way that a search takes, the clock how far it comes.
    `rounds` of local search, then without integer programs, also fix how far, unless `budget_s` is over before."""
    begun = time.perf_counter()
    tables = [costs] if isinstance(costs, CostTable) else list(costs)
    if not tables:
        raise ZbfxError("plan needs a cost table; found an empty sequence")
    require_size(max(len(table.stages) for table in tables), microbatches)
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
    limits = limit_per_rank(costs, mem_limit)
    require_feasible(costs, limits)
    certificate = Certificate(on_common_tick(costs), microbatches, limits)
    return built(name, costs, microbatches, ranks, mem_limit, certificate)


def built(
    name: str, costs: CostTable, microbatches: int, ranks: Orders, mem_limit: MemLimit, certificate: Certificate
) -> Schedule:
    """Check and time `ranks`; `certificate` holds for these costs, or for less, and for this limit."""
    timed = check(costs, microbatches, ranks, mem_limit)
    limits = limit_per_rank(costs, mem_limit)
    schedule = Schedule(
        name=name,
        costs=costs,
        microbatches=microbatches,
        ranks=tuple(spans.actions for spans in timed.spans),
        spans=timed.spans,
        peak_bytes=timed.peak_bytes,
        mem_limit=None if limits is None else tuple(map(float, limits)),
    )
    # Equal as fractions must be equal as floats: a gap of 0 means proven optimal.
    optimal = Fraction(timed.iteration_ticks, timed.ticks_per_s) <= certificate.met_s
    return replace(schedule, lower_bound_s=schedule.iteration_s if optimal else float(certificate.seconds))


def _plan_one(
    costs: CostTable,
    microbatches: int,
    schedule: ScheduleRequest,
    mem_limit: MemLimit,
    budget_s: float,
    rounds: int | None,
    seed: int,
) -> Schedule:
    coarse = on_common_tick(costs)
    if isinstance(schedule, str) and schedule in SEARCHED:
        found = _search(schedule, coarse, microbatches, mem_limit, budget_s, rounds, seed)
        return found if coarse is costs else as_costs_are(found, costs)
    if isinstance(schedule, Improve):
        start = named_orders(schedule.start, costs, microbatches, mem_limit)
        found = _search(FROM_A_START, coarse, microbatches, mem_limit, budget_s, rounds, seed, start)
        return found if coarse is costs else as_costs_are(found, costs)
    name, orders = named_orders(schedule, costs, microbatches, mem_limit)
    return build(name, costs, microbatches, orders, mem_limit)


def as_costs_are(found: Schedule, costs: CostTable) -> Schedule:
    """A schedule that was searched for under costs rounded down, with its times under `costs`. What is optimal there
    is so here, to nine digits."""
    timed = check(costs, found.microbatches, found.ranks)
    note = "times are rounded down to a billionth of the longest action: optimal means to nine digits"
    made = replace(found, costs=costs, spans=timed.spans, notes=(*found.notes, note))
    return replace(made, lower_bound_s=made.iteration_s) if found.gap == 0 else made


def named_orders(request: Any, costs: CostTable, microbatches: int, mem_limit: MemLimit) -> tuple[str, Orders]:
    """The orders that a request stands for where nothing is searched, and what they are called."""
    if isinstance(request, str):
        if request not in GENERATORS:
            close = get_close_matches(request.lower().replace("_", "-"), names(), n=1)
            meant = f"; did you mean {close[0]!r}?" if close else "."
            raise ZbfxError(f"no schedule is called {request!r}{meant} Known: {', '.join(names())}")
        name, generate = request, GENERATORS[request]
    elif isinstance(request, Schedule):
        return request.name, request.ranks
    elif callable(request):
        name, generate = getattr(request, "__name__", "generated"), request
    else:
        return "custom", read_orders(request)
    return name, generated(generate, costs, microbatches, limit_per_rank(costs, mem_limit))


def _search(
    name: str,
    costs: CostTable,
    microbatches: int,
    mem_limit: MemLimit,
    budget_s: float,
    rounds: int | None,
    seed: int,
    start: tuple[str, Orders] | None = None,
) -> Schedule:
    """Search under the tighter of the user's limit and the schedule's own, then refine by integer programs. `start`:
    a schedule of the user's, from which search goes on, too."""
    deadline_s = time.perf_counter() + budget_s
    wanted = SEARCHED[name]
    wanted.require_placement(name, costs)
    limits = _tighter(limit_per_rank(costs, mem_limit), limit_per_rank(costs, wanted.mem_limit))
    require_feasible(costs, limits)
    actions = 3 * len(costs.stages) * microbatches
    if actions > LEAST_ACTIONS_OF_LARGE:
        return _search_large(name, costs, microbatches, limits, deadline_s, start)
    small = actions <= MOST_ACTIONS_OF_SMALL
    program_share = wanted.program_share if small else wanted.large_program_share
    programs = rounds is None and bool(solvers())
    program_s = program_share * budget_s if programs else 0.0
    search = OrderSearch(costs, microbatches, limits, seed, deadline_s - program_s, rounds)
    if search.anneals:
        search.deadline_s = deadline_s - min(program_s, wanted.annealed_program_share * budget_s)
    compared = [] if start is None else [search.compare(start[0], valid(costs, microbatches, start[1]))]
    compared += [_compare(search, other) for other in wanted.seeds]
    search.lead()
    for other in GENERATORS:
        if other not in wanted.seeds and (wanted.compares or search.running()):
            compared.append(_compare(search, other))
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


def _compare(search: OrderSearch, name: str) -> str:
    """Let the search take what a generator makes. In one line what it costs, or why it is none."""
    try:
        return search.compare(name, generated(GENERATORS[name], search.costs, search.microbatches, search.limits))
    except WrongPlacement as refusal:  # what to do about it is for those who asked for this schedule
        return f"{name}: not compared, {refusal.reason}"
    except ZbfxError as refusal:
        return f"{name}: {str(refusal).splitlines()[0]}"


def _search_large(
    name: str,
    costs: CostTable,
    microbatches: int,
    limits: Sequence[Number] | None,
    deadline_s: float,
    start: tuple[str, Orders] | None,
) -> Schedule:
    """Few passes, the best first: a start of the user's, list schedules, orders by hand, more list schedules. Where not
    even one list schedule would end in time, orders by hand take its place."""
    certificate = Certificate(costs, microbatches, limits)
    problem = instance(costs, microbatches)
    units = problem.units(limits)
    search = LargeSearch(problem, units, ceil(certificate.met_s * problem.ticks_per_s), deadline_s)
    compared = []
    if start is not None:
        given = valid(costs, microbatches, start[1])
        compared.append(search.compare(start[0], lambda: given))
    rules = large_rules(problem, units, certificate.warm_up)
    search.expect(instance(costs, max(1, microbatches // TIMED_PART)))
    for other in fastest_first(GENERATORS):
        search.lists(rules, RULES_BETWEEN)
        try:
            generate = GENERATORS[other]
            orders = partial(_as_arrays, generate, costs, microbatches, limits)
            compared.append(search.compare(other, orders, as_arrays=letters_of(generate) is not None))
        except WrongPlacement as refusal:
            compared.append(f"{other}: not compared, {refusal.reason}")
        except ZbfxError as refusal:
            compared.append(f"{other}: {str(refusal).splitlines()[0]}")
    search.lists(rules)
    if search.best is None:
        search.offer(evaluated(problem, one_by_one(problem), units), "one microbatch after the other")
    assert search.best is not None
    proven = search.best.cost <= search.target
    why = "the bound is met: proven optimal" if proven else "time is up"
    note = f"{why}; the bound is {float(certificate.seconds):g} ({certificate.argument})"
    ranks = problem.decode(search.best.orders)
    found = built(name, costs, microbatches, ranks, limits, certificate)
    return replace(found, notes=(*compared, *search.notes, note))


def _as_arrays(generate: Generator, costs: CostTable, microbatches: int, limits: Sequence[Number] | None) -> Orders:
    """What a generator makes; as arrays where its letters are known, for millions of actions take long to make."""
    make_letters = letters_of(generate)
    if make_letters is None:
        return generated(generate, costs, microbatches, limits)
    rows = make_letters(costs, microbatches)
    return tuple(in_ascending_order(letters, len(costs.stages), microbatches) for letters in rows)


def valid(costs: CostTable, microbatches: int, orders: Orders) -> Orders:
    """The orders, if they break no rule but the memory limit. Raises `InvalidSchedule`."""
    check(costs, microbatches, orders)
    return orders


def _tighter(one: Sequence[Number] | None, other: Sequence[Number] | None) -> tuple[Number, ...] | None:
    if one is None or other is None:
        return tuple(one or other or ()) or None
    return tuple(min(a, b, key=exact) for a, b in zip(one, other, strict=True))


def _short(placement: Sequence[int]) -> str:
    return " ".join(map(str, placement)) if len(placement) <= 16 else " ".join(map(str, placement[:16])) + " ..."
