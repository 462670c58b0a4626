"""The pipeline as columns of numbers: each stage feeds the next, and gets its gradient from it. Bounds reason about it.

Takes   an `Instance` and a limit per rank.
Gives   a `ChainPipeline` for any placement, a `LinearPipeline` for one stage per rank; None where the stages are no
        chain. `split_only` gives costs without fused backwards.
Raises  nothing. Source: section 2.3 of the paper for the symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbfx.plan import CostTable, Kind, StageCost
from zbfx.timing.exact import BW, B, F, Instance, W, exact, exact_seconds


@dataclass(frozen=True)
class ChainPipeline:
    """Ticks and memory units per stage, counted from 0; `there[i]` and `back[i]` lie between stages i and i + 1. The
    first p stages lie on p ranks."""

    microbatches: int
    placement: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]
    there: tuple[int, ...]
    back: tuple[int, ...]
    saved: tuple[int, ...]  # M_B
    weight_saved: tuple[int, ...]  # M_W
    limits: tuple[int, ...] | None  # units for activations, per rank

    @property
    def stages(self) -> range:
        return range(len(self.forward))

    @property
    def rank_count(self) -> int:
        return max(self.placement) + 1

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self.placement) if owner == rank]

    def first_start(self, stage: int) -> int:
        """When `stage`, one of the first p, begins F0, in every schedule: nothing can precede it on its rank."""
        return sum(self.forward[:stage]) + sum(self.there[:stage])


@dataclass(frozen=True)
class LinearPipeline(ChainPipeline):
    """One stage per rank, in the order of ranks."""

    def work(self, stage: int) -> int:
        return self.microbatches * (self.forward[stage] + self.backward[stage] + self.weight[stage])

    def round_trip(self, stage: int) -> int:
        """`R_i` of the bounds: T_F of `stage`, T_B of the next stage, T_comm both ways."""
        return self.forward[stage] + self.backward[stage + 1] + self.there[stage] + self.back[stage]

    def most_in_flight(self, stage: int) -> int:
        """How many M_B fit at once: floor(M / M_B), at most m."""
        if self.limits is None or self.saved[stage] == 0:
            return self.microbatches
        return min(self.microbatches, self.limits[stage] // self.saved[stage])

    def most_pending(self, stage: int, in_flight: int = 0) -> int:
        """How many M_W fit beside `in_flight` M_B, at most the other microbatches."""
        others = self.microbatches - in_flight
        if self.limits is None or self.weight_saved[stage] == 0:
            return others
        return min(others, (self.limits[stage] - in_flight * self.saved[stage]) // self.weight_saved[stage])


def linear_pipeline(problem: Instance, limits: Sequence[int] | None) -> LinearPipeline | None:
    """The problem as a `LinearPipeline`; None if it is not one."""
    pipe = chain_pipeline(problem, limits)
    return pipe if isinstance(pipe, LinearPipeline) else None


def chain_pipeline(problem: Instance, limits: Sequence[int] | None) -> ChainPipeline | None:
    """The problem as a `ChainPipeline`; None if it is not one. Edges that skip stages are left out: a relaxation."""
    count, m, ticks = problem.stage_count, problem.microbatches, problem.ticks
    there, back = [], []
    for stage in range(count - 1):
        forward = [lag for source, lag in problem.sources[stage + 1] if source == stage]
        backward = [lag for source, lag in problem.sources[B * count + stage] if source == B * count + stage + 1]
        if not forward or not backward:
            return None
        there.append(max(forward))
        back.append(max(backward))
    if len(set(problem.placement[: problem.rank_count])) < problem.rank_count:
        return None

    def column(kind: int) -> tuple[int, ...]:
        return ticks[kind * count : (kind + 1) * count]

    linear = problem.placement == tuple(range(count))
    return (LinearPipeline if linear else ChainPipeline)(
        microbatches=m,
        placement=problem.placement,
        forward=column(F),
        backward=column(B),
        weight=column(W),
        there=tuple(there),
        back=tuple(back),
        saved=problem.grows[:count],
        weight_saved=tuple(-size for size in problem.grows[W * count : BW * count]),
        limits=None if limits is None else tuple(limits),
    )


def split_only(costs: CostTable) -> CostTable:
    """Costs under which no fused backward beats B and W apart, and no schedule costs more than under `costs`. Let B'
    take min(T_B, T_BW), W' the rest of min(T_B + T_W, T_BW), and hold min(M_B, M_W) in between. Replace every BW by B'
    and W' back to back: as long at most, the gradient earlier, memory no higher. Every B and W become no longer and
    hold no more. So a lower bound for the result is one for `costs`."""

    def relaxed(stage: StageCost) -> StageCost:
        apart = exact(stage.backward_input_s) + exact(stage.backward_weight_s)
        fused = exact_seconds(stage, Kind.BW)
        backward = min(exact(stage.backward_input_s), fused)
        return replace(
            stage,
            backward_input_s=backward,
            backward_weight_s=min(apart, fused) - backward,
            weight_saved_bytes=min(stage.weight_saved_bytes, stage.saved_bytes),
            backward_s=None,
        )

    if all(s.backward_s is None and s.weight_saved_bytes <= s.saved_bytes for s in costs.stages):
        return costs
    return replace(costs, stages=tuple(map(relaxed, costs.stages)))
