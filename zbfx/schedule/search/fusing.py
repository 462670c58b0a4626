"""Where splitting a backward does not pay: stages whose B and W run fused as BW.

Takes   an `Instance`, coded orders, stages.
Gives   orders with fused backwards, or without any (`unfuse`), and what orders cost.
Raises  nothing. Source: ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from zbfx.plan import CostTable, Kind, StageCost
from zbfx.schedule.search.list_scheduling import Listed
from zbfx.timing.exact import BW, B, Instance, W, exact_seconds, iteration_ticks, longest_paths, peak_units


def savings(problem: Instance) -> dict[int, int]:
    """Per stage the ticks by which BW is shorter than B and W apart, over all microbatches."""
    count, m, ticks = problem.stage_count, problem.microbatches, problem.ticks
    return {
        stage: m * (ticks[B * count + stage] + ticks[W * count + stage] - ticks[BW * count + stage])
        for stage in range(count)
    }


def fused_costs(costs: CostTable, stages: Collection[int]) -> CostTable:
    """Costs in which the B of `stages` is their BW and their W nothing."""

    def fused(stage: StageCost) -> StageCost:
        whole = exact_seconds(stage, Kind.BW)
        return replace(stage, backward_input_s=whole, backward_weight_s=0, weight_saved_bytes=0, backward_s=None)

    return replace(costs, stages=tuple(fused(s) if i in stages else s for i, s in enumerate(costs.stages)))


def fuse(problem: Instance, orders: Sequence[Sequence[int]], stages: Collection[int]) -> list[list[int]]:
    """Run BW of `stages` where their B was, and no W."""
    count, m = problem.stage_count, problem.microbatches

    def replaced(order: Sequence[int]) -> list[int]:
        codes = []
        for code in order:
            kind, stage = divmod(code // m, count)
            if stage not in stages or kind not in (B, W):
                codes.append(code)
            elif kind == B:
                codes.append(code + (BW - B) * count * m)
        return codes

    return [replaced(order) for order in orders]


def unfuse(problem: Instance, order: Sequence[int]) -> list[int]:
    """Every BW as B and W back to back."""
    count, m = problem.stage_count, problem.microbatches
    codes = []
    for code in order:
        if code >= BW * count * m:
            codes += [code - (BW - B) * count * m, code - (BW - W) * count * m]
        else:
            codes.append(code)
    return codes


def split_last(problem: Instance, orders: Sequence[Sequence[int]], share: int) -> list[list[int]]:
    """The last `share * i` fused backwards of rank i as B, their Ws in the end: what they fill would be idle, as later
    ranks are done sooner."""
    found = []
    for rank, order in enumerate(orders):
        fused = [code for code in order if code >= BW * problem.stage_count * problem.microbatches]
        last = set(fused[len(fused) - share * rank :]) if share * rank < len(fused) else set(fused)
        apart = {code: unfuse(problem, [code]) for code in last}
        codes = [apart[code][0] if code in last else code for code in order]
        found.append([*codes, *(apart[code][1] for code in fused if code in last)])
    return found


def one_by_one(problem: Instance) -> list[list[int]]:
    """The orders that need least memory: one microbatch after the other, every backward fused."""
    count, m = problem.stage_count, problem.microbatches
    own: list[list[int]] = [[] for _ in range(problem.rank_count)]
    for stage, rank in enumerate(problem.placement):
        own[rank].append(stage)
    return [
        [group * m + j for j in range(m) for group in (*stages, *(BW * count + s for s in reversed(stages)))]
        for stages in own
    ]


def evaluated(problem: Instance, orders: Sequence[Sequence[int]], limits: Sequence[int] | None) -> Listed | None:
    """The orders with their cost, or None if they deadlock or exceed the limits."""
    if limits is not None and any(peak_units(problem, o) > limit for o, limit in zip(orders, limits, strict=True)):
        return None
    result = longest_paths(problem, orders)
    if not result.complete:
        return None
    return Listed(iteration_ticks(problem, orders, result.starts), tuple(map(tuple, orders)))


def fuse_where_it_pays(problem: Instance, best: Listed, limits: Sequence[int] | None) -> tuple[Listed, list[int]]:
    """Fuse stages that save time, or whose W takes none, unless the cost rises; the result and the fused stages."""
    count, fused = problem.stage_count, []
    saved = savings(problem)
    for stage in sorted(saved, key=lambda s: -saved[s]):
        if saved[stage] < 0 or (saved[stage] == 0 and problem.ticks[W * count + stage] > 0):
            continue
        other = evaluated(problem, fuse(problem, best.orders, {stage}), limits)
        if other is not None and other.cost <= best.cost:
            best = other
            fused.append(stage)
    return best, sorted(fused)
