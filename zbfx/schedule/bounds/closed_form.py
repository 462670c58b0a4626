"""Lower bounds on the paper's cost, in ticks: what no schedule can beat, each with its argument.

Takes   an `Instance` or a `LinearPipeline`, and a limit per rank.
Gives   the least ticks of a step: the work of a rank and the idle time that it cannot avoid.
Raises  nothing.
Source  ours, with the paper's symbols. `S_i = T_F + T_B + T_W` of stage i, `M` the memory limit for activations,
        `R_i = T_F(i) + T_B(i+1) + T_comm both ways` the round trip between neighbours. Stages count from 0.
        Microbatches of one kind and stage run in order: exchanging two of them changes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from zbfx.schedule.bounds.chain import LinearPipeline
from zbfx.timing.exact import B, F, Instance, W

EXACT_TICKS = 1 << 50  # of the longest way: floats are whole up to 2**53
AT_ONCE = 256  # stages


@dataclass(frozen=True)
class HeadTail:
    """`cost`: the bound. `warm_up[i]`: fewest and most Fs before stage i's first B in a schedule of this cost."""

    cost: int
    warm_up: tuple[tuple[int, int], ...]


def work_bound(problem: Instance) -> int:
    """The heaviest rank must do its work: C >= m * (sum of S_i over its stages)."""
    count, m = problem.stage_count, problem.microbatches
    work = [0] * problem.rank_count
    for stage, rank in enumerate(problem.placement):
        work[rank] += m * sum(problem.ticks[kind * count + stage] for kind in (F, B, W))
    return max(work)


def tail_idle(pipe: LinearPipeline) -> list[int]:
    """Idle ticks that stage i cannot avoid after its last F. From the end of its last F until its last W ends, stage i
    sees that microbatch travel to the last stage and back: at least z_i + T_W with z_last = T_B and z_i = z_(i+1) +
    T_F(i+1) + T_B(i) + T_comm both ways. When the last F ends, a >= 1 microbatches wait for B and w for W, so a M_B + w
    M_W <= M and a + w <= m; all work left is a T_B + (a + w) T_W. What the window exceeds the largest such work by is
    idle."""
    idle, window = [], 0
    for i in reversed(pipe.stages):
        window = (
            pipe.backward[i]
            if i == pipe.stages[-1]
            else window + pipe.forward[i + 1] + pipe.backward[i] + pipe.there[i] + pipe.back[i]
        )
        most = max(
            a * pipe.backward[i] + (a + pipe.most_pending(i, a)) * pipe.weight[i]
            for a in range(1, pipe.most_in_flight(i) + 1)
        )
        idle.append(max(0, window + pipe.weight[i] - most))
    return idle[::-1]


def head_needs(pipe: LinearPipeline) -> list[int]:
    """The least time x_i from the start of stage i's first F to that of its first B: to the last stage and back."""
    needs = [pipe.forward[-1]]
    for i in reversed(pipe.stages[:-1]):
        needs.append(needs[-1] + pipe.round_trip(i))
    return needs[::-1]


def head_tail_bound(pipe: LinearPipeline) -> HeadTail:
    """Bound (a): idle before the first B and after the last F, at every stage at once.

    Before stage i's first B only its Fs can run, k_i of them with k_i M_B <= M and k_i <= m. So x_i, the time from its
    first F to its first B, is at least k_i T_F, and x_i - k_i T_F is idle. Neighbours are tied: stage i's first B waits
    for stage i+1's, whose clock starts T_F + T_comm later, so x_i >= x_(i+1) + R_i. If k_i < m the last F comes after
    the first B, so head and tail idle add up: C >= m S_i + (x_i - k_i T_F) + t_i; if k_i = m the larger of them counts.
    For a given C the last stage's smallest admissible x is best for all others, so one sweep from the last stage
    decides whether integers k_i exist; the bound is the smallest C for which they do, found by bisection."""
    tails = tail_idle(pipe)
    low, high = max(map(pipe.work, pipe.stages)), max(map(pipe.work, pipe.stages)) + max(head_needs(pipe)) + max(tails)
    while low < high:
        middle = (low + high) // 2
        if _warm_up(pipe, tails, middle) is None:
            low = middle + 1
        else:
            high = middle
    warm_up = _warm_up(pipe, tails, low)
    assert warm_up is not None
    return HeadTail(low, warm_up)


def _warm_up(pipe: LinearPipeline, tails: list[int], cost: int) -> tuple[tuple[int, int], ...] | None:
    """Range of k_i per stage within `cost`, or None if some stage has none."""
    m = pipe.microbatches
    counts: list[tuple[int, int]] = []
    later = 0  # x of the stage after
    for i in reversed(pipe.stages):
        time, most = pipe.forward[i], pipe.most_in_flight(i)
        need = time if i == pipe.stages[-1] else later + pipe.round_trip(i)
        spare = cost - pipe.work(i)
        fit = most if time == 0 else min(most, need // time)  # as many as delay nothing
        idle = need - fit * time
        if max(idle, tails[i]) <= spare if fit == m else idle + tails[i] <= spare:
            fewest = fit if fit == m or time == 0 else max(1, -((spare - tails[i] - need) // time))
            counts.append((min(fewest, fit), fit))
            later = need
        elif fit < most and tails[i] <= spare:
            counts.append((fit + 1, fit + 1))
            later = (fit + 1) * time
        else:
            return None
    return tuple(counts[::-1])


def stream_bound(pipe: LinearPipeline) -> int:
    """Bound (b): some rank r waits for everything that a later stage i does between its first F and its last B. Stage
    i's first F starts no earlier than the way from stage r's first F, its last B ends no later than the way back to
    stage r's last B, which a W of stage r follows. In between stage i does m Fs, m Bs, is idle at its head (x_i at its
    least and k_i at its most), and runs all Ws but the floor(M / M_W) whose M_W it may still hold at its last B."""
    needs = head_needs(pipe)
    best = 0
    for i in pipe.stages:
        time = pipe.forward[i] + pipe.backward[i]
        head = max(0, needs[i] - pipe.most_in_flight(i) * pipe.forward[i])
        forced = max(0, pipe.microbatches - pipe.most_pending(i))
        stream = pipe.microbatches * time + head + forced * pipe.weight[i]
        for r in range(i, -1, -1):
            if r < i:
                # There: T_F of r and the edge; back: the edge and T_B of r.
                stream += pipe.forward[r] + pipe.there[r] + pipe.back[r] + pipe.backward[r]
            best = max(best, stream + pipe.weight[r])
    return best


def paths_from(problem: Instance, stage: int) -> list[float]:
    """Longest way from the start of `stage`'s F to that of every group of its microbatch; -inf where there is none."""
    count = problem.stage_count
    start = [-inf] * (3 * count)
    start[stage] = 0
    for group in (*range(count), *range(2 * count - 1, count - 1, -1), *range(2 * count, 3 * count)):
        for source, lag in problem.sources[group]:
            start[group] = max(start[group], start[source] + problem.ticks[source] + lag)
    return start


Ways = Mapping[tuple[int, int], tuple[float, float]]


def ways_on_ranks(problem: Instance) -> Ways:
    """For every two stages of one rank: the longest ways from the start of the first one's F to that of the other's B,
    and of its W, on one microbatch; -inf where there is none."""
    count = problem.stage_count
    if sum(problem.ticks) + sum(lag for needed in problem.sources for _, lag in needed) < EXACT_TICKS:
        rows: Iterable[tuple[int, Sequence[float] | NDArray[np.float64]]] = _ways_as_arrays(problem)
    else:
        rows = ((stage, paths_from(problem, stage)) for stage in range(count))
    own: dict[int, list[int]] = {}
    for stage, rank in enumerate(problem.placement):
        own.setdefault(rank, []).append(stage)
    return {
        (stage, other): (way[B * count + other], way[W * count + other])
        for stage, way in rows
        for other in own[problem.placement[stage]]
    }


def _ways_as_arrays(problem: Instance) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """`paths_from` every stage, many stages at a time. Floats are exact up to `EXACT_TICKS`."""
    count = problem.stage_count
    order = (*range(count), *range(2 * count - 1, count - 1, -1), *range(2 * count, 3 * count))
    for first in range(0, count, AT_ONCE):
        stages = range(first, min(count, first + AT_ONCE))
        start = np.full((3 * count, len(stages)), -inf)
        start[stages, range(len(stages))] = 0
        for group in order:
            for source, lag in problem.sources[group]:
                np.maximum(start[group], start[source] + (problem.ticks[source] + lag), out=start[group])
        yield from zip(stages, start.T, strict=True)


def one_rank_bound(problem: Instance, limits: Sequence[int] | None, between: Ways) -> int:
    """Idle at the head and at the tail of each rank, for any placement.

    Where all of a rank's stages follow its first one, F0 of that stage is the rank's first action and microbatch 0 must
    travel from it to the rank's first B: x. Only Fs can run before, at most as many as memory holds; the rest of x is
    idle. Likewise from the end of the rank's last F, which is the last F of one of its stages, that microbatch must
    travel to the end of its Bs and of a W on this rank; what is left to do then is what memory holds. The two idle
    times are disjoint if memory cannot hold all Fs before the first B; else the longer one counts."""
    count, m = problem.stage_count, problem.microbatches
    own: list[list[int]] = [[] for _ in range(problem.rank_count)]
    for stage, rank in enumerate(problem.placement):
        own[rank].append(stage)
    best = 0
    for rank, stages in enumerate(own):
        work = m * sum(problem.ticks[kind * count + s] for s in stages for kind in (F, B, W))
        first = min(stages)
        if any(between[first, s][0] == -inf for s in stages):
            best = max(best, work)
            continue
        x = min(between[first, s][0] for s in stages)
        window = min(
            max(between[stage, s][1] + problem.ticks[W * count + s] for s in stages) - problem.ticks[stage]
            for stage in stages
        )
        limit = None if limits is None else limits[rank]
        before, after = _most_before_first_b(problem, stages, limit), _most_after_last_f(problem, stages, limit)
        head, tail = max(0, int(x) - before[1]), max(0, int(window) - after)
        best = max(best, work + (head + tail if before[0] < m * len(stages) else max(head, tail)))
    return best


def occupancy_bound(problem: Instance, limits: Sequence[int] | None, between: Ways) -> int:
    """Memory times time: a rank whose limit is M offers at most M C while it takes C. Each microbatch takes M_B of
    stage s from the start of its F to the end of its B, at least as long as its way from one to the other, and M_W
    during its W."""
    if limits is None:
        return 0
    count, m = problem.stage_count, problem.microbatches
    taken = [0] * problem.rank_count
    for stage, rank in enumerate(problem.placement):
        held = between[stage, stage][0] + problem.ticks[B * count + stage]
        pending = -problem.grows[W * count + stage] * problem.ticks[W * count + stage]
        taken[rank] += m * (problem.grows[stage] * int(held) + pending)
    return max((-(-needed // limit) for needed, limit in zip(taken, limits, strict=True) if limit > 0), default=0)


def _most_before_first_b(problem: Instance, stages: Sequence[int], limit: int | None) -> tuple[int, int]:
    """How many Fs fit before the first B, and at most how long they take."""
    total = problem.microbatches * len(stages)
    smallest = min(problem.grows[s] for s in stages)
    number = total if limit is None or smallest == 0 else min(total, limit // smallest)
    return number, number * max(problem.ticks[s] for s in stages)


def _most_after_last_f(problem: Instance, stages: Sequence[int], limit: int | None) -> int:
    """At most how much work is left when the last F ends: the most that a M_B + w M_W <= M admits."""
    count, total = problem.stage_count, problem.microbatches * len(stages)
    saved = min(problem.grows[s] for s in stages)
    weight_saved = min(-problem.grows[W * count + s] for s in stages)
    backward, weight = (max(problem.ticks[kind * count + s] for s in stages) for kind in (B, W))
    flying = total if limit is None or saved == 0 else min(total, limit // saved)
    most = 0
    for a in range(1, flying + 1):
        pending = (
            total - a if limit is None or weight_saved == 0 else min(total - a, (limit - a * saved) // weight_saved)
        )
        most = max(most, a * backward + (a + pending) * weight)
    return most
