"""The one checker: what makes a schedule correct, whoever made it.

Takes   a cost table, a number of microbatches, an order of actions per rank, a memory limit.
Gives   the `Timeline` of a correct schedule.
Raises  `InvalidSchedule` with a picture of the ranks around the first broken rule, `OverLimit` if that is the memory
        limit; `NoFeasibleSchedule` if no order meets the limit. Source: appendix G of the paper; ascending Fs are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zbfx.errors import InvalidSchedule, OverLimit
from zbfx.plan import Action, CostTable, Kind
from zbfx.timing.exact import Instance, instance
from zbfx.timing.limits import MemLimit, limit_per_rank, require_feasible
from zbfx.timing.simulate import Timeline, describe_deadlock, excerpt, timeline

BEFORE = {Kind.F: (), Kind.B: (Kind.F,), Kind.W: (Kind.B,), Kind.BW: (Kind.F,)}  # of one stage and microbatch


def check(
    costs: CostTable, microbatches: int, ranks: Sequence[Sequence[Action]], mem_limit: MemLimit = None
) -> Timeline:
    """Raise unless `ranks` runs every F, B and W exactly once, in a possible order, within the limit and to the end.
    Every stage runs its Fs in ascending order of microbatches; Bs and Ws may come in any order. Raises InvalidSchedule
    with a picture of the ranks around the failing cell, NoFeasibleSchedule if no order at all meets the limit."""
    problem = instance(costs, microbatches)
    limits = limit_per_rank(costs, mem_limit)
    require_feasible(costs, limits)
    orders = problem.encode(ranks)
    if not keeps_rules(problem, orders):
        for rank, order in enumerate(ranks):
            _check_order(costs, ranks, rank, order)
        _check_complete(costs, microbatches, ranks)
    timed = timeline(problem, orders)
    if timed is None:
        raise InvalidSchedule(describe_deadlock(problem, orders))
    allowed = problem.units(limits)
    if allowed is not None and any(peak > most for peak, most in zip(timed.peak_units, allowed, strict=True)):
        _check_memory(problem, ranks, allowed, timed)
    return timed


def keeps_rules(problem: Instance, orders: Sequence[Sequence[int]]) -> bool:
    """Whether coded orders run every F, B and W once, on its rank, F before B before W, and Fs in ascending order."""
    count, m = problem.stage_count, problem.microbatches
    owners = np.array(problem.placement)
    places = np.full(4 * count * m, -1, dtype=np.int64)  # in the order of its rank, by code
    for rank, order in enumerate(orders):
        codes = np.array(order, dtype=np.int64)
        numbers = np.arange(len(codes))
        if (owners[codes // m % count] != rank).any():
            return False
        places[codes] = numbers
        if (places[codes] != numbers).any():  # some code twice
            return False
    f, b, w, fused = places.reshape(4, count, m)
    apart = (fused < 0) & (b > f) & (w > b)
    whole = (fused > f) & (b < 0) & (w < 0)
    return bool((f >= 0).all() and (np.diff(f) > 0).all() and (apart | whole).all())


def _fail(
    ranks: Sequence[Sequence[Action]], rank: int, step: int, text: str, kind: type[InvalidSchedule] = InvalidSchedule
) -> InvalidSchedule:
    return kind(f"rank {rank}, step {step}: {text}\n{excerpt(ranks, {rank: step})}")


def _check_order(costs: CostTable, ranks: Sequence[Sequence[Action]], rank: int, order: Sequence[Action]) -> None:
    """Placement, doubles, F before B before W, and ascending Fs."""
    done: set[Action] = set()
    next_forward = [0] * len(costs.stages)
    for step, action in enumerate(order):
        stage, microbatch = action.stage, action.microbatch
        if costs.placement[stage] != rank:
            raise _fail(
                ranks, rank, step, f"{action} belongs on rank {costs.placement[stage]}, where stage {stage} lives"
            )
        done_as_whole = action.kind in (Kind.B, Kind.W) and Action(Kind.BW, stage, microbatch) in done
        done_in_parts = action.kind is Kind.BW and Action(Kind.B, stage, microbatch) in done
        if action in done or done_as_whole or done_in_parts:
            raise _fail(ranks, rank, step, f"{action} runs a second time; every F, B and W runs exactly once")
        for kind in BEFORE[action.kind]:
            if Action(kind, stage, microbatch) not in done:
                raise _fail(
                    ranks, rank, step, f"{action} runs before {Action(kind, stage, microbatch)}; the order is F, B, W"
                )
        if action.kind is Kind.F:
            if microbatch != next_forward[stage]:
                expected = Action(Kind.F, stage, next_forward[stage])
                raise _fail(
                    ranks, rank, step, f"{action} runs where {expected} is due; a stage's Fs run in ascending order"
                )
            next_forward[stage] += 1
        done.add(action)


def _check_complete(costs: CostTable, microbatches: int, ranks: Sequence[Sequence[Action]]) -> None:
    for rank, order in enumerate(ranks):
        done = set(order)
        for stage in costs.stages_of(rank):
            for microbatch in range(microbatches):
                if Action(Kind.BW, stage, microbatch) in done:
                    continue
                missing = [k for k in (Kind.F, Kind.B, Kind.W) if Action(k, stage, microbatch) not in done]
                if missing:
                    action = Action(missing[0], stage, microbatch)
                    raise _fail(ranks, rank, len(order) - 1, f"{action} is missing; every F, B and W runs exactly once")


def _check_memory(
    problem: Instance, ranks: Sequence[Sequence[Action]], allowed: Sequence[int], timed: Timeline
) -> None:
    m = problem.microbatches
    for rank, order in enumerate(problem.encode(ranks)):
        held = 0
        for step, code in enumerate(order):
            held += problem.grows[code // m]
            if held > allowed[rank]:
                text = (
                    f"{ranks[rank][step]} raises memory to {problem.bytes(held + problem.static[rank]):g}, "
                    f"over the limit of {problem.bytes(allowed[rank] + problem.static[rank]):g}; "
                    f"this order needs {timed.peak_bytes[rank]:g}"
                )
                raise _fail(ranks, rank, step, text, OverLimit)
