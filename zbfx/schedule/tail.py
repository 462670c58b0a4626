"""The end of a rank's order where gradients are summed over replicas: the last Ws run bucket by bucket.

Takes   a schedule, and for each bucket of gradients a `Portion`: its part of the Ws, and the seconds of its sum.
Gives   a `Tail` per rank: how many of the last Ws run bucket by bucket, and in which order of the buckets, so that the
        sums hide behind them. Microbatches keep their order within a bucket.
Raises  nothing for a schedule that was checked. Source: appendix A of the paper; Johnson's rule (1954) for the flow
        shop of two machines, Ws and sums, in which each bucket is a job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zbfx.plan import Action, Kind
from zbfx.schedule.schedule import Schedule
from zbfx.timing.exact import instance, peak_units
from zbfx.timing.validity import check

LEAST_HIDDEN_SHARE = 0.01  # share of the exposed time that putting off more Ws has to hide

Timed = Sequence[tuple[Action, float, float]]  # unfused actions with their start and end, in seconds


@dataclass(frozen=True)
class Portion:
    """What the planner knows of a bucket. `weight_s[stage]`: its part of a W of the stage. `backward_stages`: the
    stages whose B adds to it. `reduce_s`: its sum over the replicas. `at_end`: the sum begins after the last action."""

    weight_s: Mapping[int, float]
    backward_stages: frozenset[int]
    reduce_s: float
    at_end: bool = False


@dataclass(frozen=True)
class Ending:
    """How a rank's order may end: its last `trailing` actions are Ws, `weights` of each stage, from `begin_s` to
    `end_s`. `order` is its unfused order, `finished_s` the last end of each stage's B and W before `begin_s`."""

    trailing: int
    order: tuple[Action, ...]
    begin_s: float
    end_s: float
    weights: Mapping[int, int]
    finished_s: Mapping[tuple[Kind, int], float]


@dataclass(frozen=True)
class Tail:
    """An ending whose trailing Ws run in parts. `sequence`: the buckets in the order of their sums. `sums_s`: start and
    end of each sum."""

    ending: Ending
    sequence: tuple[int, ...]
    sums_s: tuple[tuple[float, float], ...]

    @property
    def reduced_s(self) -> float:
        return self.sums_s[-1][1] if self.sums_s else 0.0

    @property
    def exposed_s(self) -> float:
        """How long the rank waits for its sums after its last action."""
        return max(0.0, self.reduced_s - self.ending.end_s)


def tail_of(ending: Ending, portions: Sequence[Portion]) -> Tail:
    """The sums of these buckets, in the best order, one at a time: each begins when its gradients are final."""
    jobs: dict[int, tuple[float, float]] = {}
    ready: dict[int, float] = {}
    for index, portion in enumerate(portions):
        if portion.at_end:
            ready[index] = ending.end_s
        elif any(stage in ending.weights for stage in portion.weight_s):
            seconds = sum(count * portion.weight_s.get(stage, 0.0) for stage, count in ending.weights.items())
            jobs[index] = (seconds, portion.reduce_s)
        else:
            sources = [(Kind.W, stage) for stage in portion.weight_s] + [(Kind.B, s) for s in portion.backward_stages]
            ready[index] = max((ending.finished_s.get(source, 0.0) for source in sources), default=0.0)
    clock_s = ending.begin_s
    parts = johnson(jobs)
    for index in parts:
        clock_s += jobs[index][0]
        ready[index] = min(clock_s, ending.end_s)  # the parts add up to the whole, but for rounding
    early = sorted((i for i in ready if i not in jobs and not portions[i].at_end), key=lambda i: ready[i])
    sequence = (*early, *parts, *(index for index in ready if portions[index].at_end))
    sums_s: list[tuple[float, float]] = []
    for index in sequence:
        start_s = max(ready[index], sums_s[-1][1] if sums_s else 0.0)
        sums_s.append((start_s, start_s + portions[index].reduce_s))
    return Tail(ending, sequence, tuple(sums_s))


def johnson(jobs: Mapping[int, tuple[float, float]]) -> list[int]:
    """The order of jobs, each (seconds on the first machine, seconds on the second), that ends first."""
    short = sorted((job for job, (a, b) in jobs.items() if a <= b), key=lambda job: jobs[job][0])
    return [*short, *sorted((job for job, (a, b) in jobs.items() if a > b), key=lambda job: -jobs[job][1])]


def best_tail(endings: Sequence[Ending], portions: Sequence[Portion]) -> Tail:
    """The tail whose sums end first. Putting off more Ws, which holds more, has to hide a share of the exposed time."""
    first, *others = (tail_of(ending, portions) for ending in endings)
    best = first
    for tail in others:
        exposed_s = best.reduced_s - first.ending.end_s
        if tail.reduced_s < best.reduced_s - LEAST_HIDDEN_SHARE * max(0.0, exposed_s):
            best = tail
    return best


def endings(schedule: Schedule, rank: int) -> list[Ending]:
    """The ways in which the rank may end, from no W in parts on. Up to all Ws that end its order anyway may run in
    parts. More Ws are put off where what they hold fits into the limit; without a limit, into the rank's peak. A rank
    with Ws beside Bs puts off none."""
    timed = unfused_spans(schedule, rank)
    order = [action for action, _, _ in timed]
    guests = dict(schedule.beside)
    stay = (k for k, action in enumerate(reversed(order)) if action.kind is not Kind.W or action in guests)
    free = next(stay, len(order))
    found = [ending(timed, trailing) for trailing in range(free + 1)]
    if any(action in guests for action in order):
        return found
    weights = sum(action.kind is Kind.W for action in order)
    arrival = arrivals(schedule, rank)
    for trailing in sorted({min(free + 2**power, weights) for power in range(weights.bit_length())} - {free}):
        late = set([action for action in order if action.kind is Kind.W][-trailing:])
        moved = [*(action for action in order if action not in late), *(action for action in order if action in late)]
        if fits(schedule, rank, moved):
            found.append(ending(retimed(schedule, moved, arrival), trailing))
    return found


def ending(timed: Timed, trailing: int) -> Ending:
    before, tail = timed[: len(timed) - trailing], timed[len(timed) - trailing :]
    end_s = timed[-1][2] if timed else 0.0
    return Ending(
        trailing,
        tuple(action for action, _, _ in timed),
        tail[0][1] if tail else end_s,
        end_s,
        Counter(action.stage for action, _, _ in tail),
        {(action.kind, action.stage): end for action, _, end in before},
    )


def unfused_spans(schedule: Schedule, rank: int) -> Timed:
    """A rank's actions with their times; a fused backward is its B, then its W."""
    timed = []
    for span in schedule.spans[rank]:
        action, middle_s = span.action, span.end_s
        if action.kind is Kind.BW:
            b_s = float(schedule.costs.stages[action.stage].backward_input_s)
            middle_s = min(span.start_s + b_s, span.end_s)
            timed.append((Action(Kind.B, action.stage, action.microbatch), span.start_s, middle_s))
            timed.append((Action(Kind.W, action.stage, action.microbatch), middle_s, span.end_s))
        else:
            timed.append((action, span.start_s, span.end_s))
    return timed


def arrivals(schedule: Schedule, rank: int) -> dict[Action, float]:
    """When the rank's F and B have what they need from other ranks."""
    costs = schedule.costs
    found: dict[Action, float] = {}
    for source in {edge.source for edge in costs.edges} | {edge.target for edge in costs.edges}:
        lags = {
            (kind, target): float(lag)
            for edge in costs.edges
            for kind, first, target, lag in (
                (Kind.F, edge.source, edge.target, edge.forward_s),
                (Kind.B, edge.target, edge.source, edge.backward_s),
            )
            if lag is not None and first == source and costs.placement[target] == rank != costs.placement[source]
        }
        for action, _, end_s in unfused_spans(schedule, costs.placement[source]) if lags else ():
            for (kind, target), lag_s in lags.items():
                if (action.kind, action.stage) == (kind, source):
                    consumer = Action(kind, target, action.microbatch)
                    found[consumer] = max(found.get(consumer, 0.0), end_s + lag_s)
    return found


def retimed(schedule: Schedule, order: Sequence[Action], arrival: Mapping[Action, float]) -> Timed:
    """The times of an order with some Ws put off. Values from other ranks arrive as in the schedule: a later W delays
    nothing that another rank waits for."""
    rank = schedule.costs.placement[order[0].stage]
    timed, clock_s = [], schedule.spans[rank][0].start_s
    for action in order:
        start_s = max(clock_s, arrival.get(action, 0.0))
        clock_s = start_s + float(schedule.costs.stages[action.stage].seconds(action.kind))
        timed.append((action, start_s, clock_s))
    return timed


def fits(schedule: Schedule, rank: int, order: Sequence[Action]) -> bool:
    problem = instance(schedule.costs, schedule.microbatches)
    limits = problem.units(schedule.mem_limit or schedule.peak_bytes)
    assert limits is not None, "given above"
    return peak_units(problem, [problem.code(action) for action in order]) <= limits[rank]


def ending_with(schedule: Schedule, tails: Sequence[Tail]) -> Schedule:
    """The schedule with the orders of these tails, one a rank, checked and timed again. The lower bound still holds."""
    ranks = tuple(
        order if tail.ending.order == tuple(a for a, _, _ in unfused_spans(schedule, rank)) else tail.ending.order
        for rank, (order, tail) in enumerate(zip(schedule.ranks, tails, strict=True))
    )
    if ranks == schedule.ranks:
        return schedule
    timed = check(schedule.costs, schedule.microbatches, ranks, schedule.mem_limit)
    same = [before == after for before, after in zip(schedule.ranks, ranks, strict=True)]
    peaks = zip(same, schedule.peak_bytes, timed.peak_bytes, strict=True)
    peak_bytes = tuple(before if kept else after for kept, before, after in peaks)
    return replace(schedule, ranks=ranks, spans=timed.spans, peak_bytes=peak_bytes)
