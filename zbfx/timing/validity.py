"""The one checker: what makes a schedule correct, whoever made it.

Takes   a cost table, a number of microbatches, an order of actions per rank, a memory limit.
Gives   the `Timeline` of a correct schedule.
Raises  `InvalidSchedule` with a picture of the ranks around the first broken rule, `OverLimit` if that is the memory
        limit; `NoFeasibleSchedule` if no order meets the limit. Source: appendix G of the paper; ascending Fs are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbfx.errors import InvalidSchedule, OverLimit
from zbfx.plan import Action, CostTable, Kind
from zbfx.timing.exact import Instance, instance
from zbfx.timing.limits import MemLimit, limit_per_rank, require_feasible
from zbfx.timing.simulate import Timeline, excerpt, simulate

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
    problem.encode(ranks)
    for rank, order in enumerate(ranks):
        _check_order(costs, ranks, rank, order)
    _check_complete(costs, microbatches, ranks)
    timed = simulate(costs, microbatches, ranks)
    if limits is not None:
        _check_memory(problem, ranks, problem.units(limits) or [], timed)
    return timed


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
