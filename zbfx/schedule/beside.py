"""W beside B: on a device with two streams, the W of one microbatch fills what the B of another leaves idle.

The products of a W keep a GPU's arithmetic busy where a B waits for memory, and the other way round: both together take
less than one after the other. A W may start once its own B has ended; here it starts with one of the next Bs of its
rank, and what it reads is held until that B has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zbfx.plan import Action, CostTable, Kind, Number, Schedule, Span, parts
from zbfx.schedule.timing.simulate import simulate

LAGS = (1, 2, 3)  # how many Bs a W may wait for the one that it runs beside
LARGE = 100_000  # actions times ranks, above which all ranks are arranged alike
ROUNDING = 1e-9  # sums of the same times in another order

Pairs = Mapping[Action, Action]  # each W and the B that it runs beside


@dataclass(frozen=True)
class Arrangement:
    """One rank's unfused order, in which every paired W stands right before its B."""

    order: tuple[Action, ...]
    pairs: Pairs


def run_beside(schedule: Schedule, stages: frozenset[int] | None = None, *, move: bool = True) -> Schedule:
    """The schedule with Ws (of `stages`, if given) beside Bs, where that fits its memory limit and ends sooner.

    `move` lets Ws change their place between the other actions of their rank, whose order stays; the Ws of a stage
    stay in theirs, so gradients keep their bits. Times, peaks and bubbles of the result count actions one after the
    other, as before; `expected_s` counts them as they run.
    """
    costs = schedule.costs
    options = [list(arrangements(schedule, rank, stages, move)) for rank in range(costs.rank_count)]
    best = soonest(costs, options)
    pairs = {guest: host for rank in best for guest, host in rank.pairs.items()}
    if not pairs:
        return schedule
    timed = simulate(costs, schedule.microbatches, [rank.order for rank in best])
    peaks = [float(peak_bytes(rank.order, costs, rank.pairs)) for rank in best]
    count = sum(action.kind is Kind.W for rank in best for action in rank.order)
    note = f"{len(pairs)} of {count} Ws run beside a B, on a second stream"
    return replace(
        schedule,
        ranks=tuple(rank.order for rank in best),
        spans=timed.spans,
        beside=tuple(pairs.items()),
        expected_s=iteration_s(expected(costs, best)),
        peak_bytes=tuple(map(max, peaks, timed.peak_bytes)),
        notes=(*schedule.notes, note),
    )


def arrangements(schedule: Schedule, rank: int, stages: frozenset[int] | None, move: bool) -> Iterator[Arrangement]:
    """The rank's order as it is, and with Ws beside Bs in each way that its memory limit allows."""
    limit = None if schedule.mem_limit is None else schedule.mem_limit[rank]
    order = tuple(part for action in schedule.ranks[rank] for part in parts(action))
    yield Arrangement(order, {})
    found = [moved(order, lag, stages) for lag in LAGS] if move else [in_place(order, stages)]
    for arrangement in found:
        if weight_orders(arrangement.order) != weight_orders(order):
            continue
        if limit is None or peak_bytes(arrangement.order, schedule.costs, arrangement.pairs) <= limit:
            yield arrangement


def in_place(order: Sequence[Action], stages: frozenset[int] | None) -> Arrangement:
    """Every W that stands right before a B runs beside it."""
    pairs = {
        action: after
        for action, after in pairwise(order)
        if action.kind is Kind.W and after.kind is Kind.B and (stages is None or action.stage in stages)
    }
    return Arrangement(tuple(order), pairs)


def moved(order: Sequence[Action], lag: int, stages: frozenset[int] | None) -> Arrangement:
    """Every W beside the B that comes `lag` Bs after its own; the last `lag` Ws at the end."""
    ready: deque[Action] = deque()  # Ws whose B has run
    found: list[Action] = []
    pairs: dict[Action, Action] = {}
    for action in order:
        if action.kind is Kind.B:
            if len(ready) == lag:
                found.append(ready.popleft())
                if stages is None or found[-1].stage in stages:
                    pairs[found[-1]] = action
            ready.append(Action(Kind.W, action.stage, action.microbatch))
        if action.kind is not Kind.W:
            found.append(action)
    return Arrangement((*found, *ready), pairs)


def weight_orders(order: Sequence[Action]) -> dict[int, list[int]]:
    """The microbatches of each stage's Ws, in order: that in which gradients add up."""
    found: dict[int, list[int]] = {}
    for action in order:
        if action.kind is Kind.W:
            found.setdefault(action.stage, []).append(action.microbatch)
    return found


def soonest(costs: CostTable, options: Sequence[Sequence[Arrangement]]) -> list[Arrangement]:
    """One arrangement per rank: the best that all ranks have alike, then improved rank by rank."""

    def seconds(choice: Sequence[Arrangement]) -> float:
        return iteration_s(expected(costs, choice))

    alike = [[rank[min(k, len(rank) - 1)] for rank in options] for k in range(max(map(len, options)))]
    best = min(alike, key=seconds)
    best_s = seconds(best)
    if sum(len(rank.order) for rank in best) * len(options) > LARGE:
        return best
    for rank, others in enumerate(options):
        for other in others:
            changed = [*best[:rank], other, *best[rank + 1 :]]
            changed_s = seconds(changed)
            if changed_s < best_s * (1 - ROUNDING):
                best, best_s = changed, changed_s
    return best


def iteration_s(ranks: Sequence[Sequence[Span]]) -> float:
    """As of `Schedule.iteration_s`; a rank's spans are in the order of their starts."""
    return max((max(span.end_s for span in spans) - spans[0].start_s for spans in ranks if spans), default=0.0)


def peak_bytes(order: Sequence[Action], costs: CostTable, pairs: Pairs) -> Number:
    """The most that a rank holds, where each paired W lets go of what it reads once its B has ended."""
    held: Number = sum(costs.stages[stage].static_bytes for stage in {action.stage for action in order})
    guests = {host: guest for guest, host in pairs.items()}
    peak = held
    for action in order:
        cost = costs.stages[action.stage]
        if action.kind is Kind.F:
            held += cost.saved_bytes
        elif action.kind is Kind.B:
            held += cost.weight_saved_bytes - cost.saved_bytes
        elif action not in pairs:
            held -= cost.weight_saved_bytes
        peak = max(peak, held)
        if action in guests:
            held -= costs.stages[guests[action].stage].weight_saved_bytes
    return peak


def shared_s(guest: Action, host: Action, costs: CostTable) -> float:
    """Seconds that a W adds to the B that it runs beside from its start to its end: its own where that was not
    measured."""

    def gain_s(stage: int) -> float:
        cost = costs.stages[stage]
        both_s = cost.backward_input_s + cost.backward_weight_s
        return 0.0 if cost.beside_s is None else max(0.0, float(both_s - cost.beside_s))

    alone_s = float(costs.stages[guest.stage].backward_weight_s)
    return max(0.0, alone_s - (gain_s(guest.stage) + gain_s(host.stage)) / 2)


def expected(costs: CostTable, ranks: Sequence[Arrangement]) -> tuple[tuple[Span, ...], ...]:
    """When every action runs, each rank's in the order of their starts. A paired W starts when its rank would start the
    B: while that still waits for its input, the W has the device to itself."""
    guests = {host: guest for rank in ranks for guest, host in rank.pairs.items()}
    needed = {(kind, stage): sources_of(kind, stage, costs) for kind in Kind for stage in range(len(costs.stages))}
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in ranks]
    queues = [[action for action in rank.order if action not in rank.pairs] for rank in ranks]
    positions, clocks = [0] * len(ranks), [0.0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while positions[rank] < len(queue):
                action = queue[positions[rank]]
                sources = [
                    (ends.get(Action(action.kind, stage, action.microbatch)), lag_s)
                    for stage, lag_s in needed[action.kind, action.stage]
                ]
                if any(end is None for end, _ in sources):
                    break
                start_s = max([clocks[rank], *(float(end or 0.0) + lag_s for end, lag_s in sources)])
                end_s = start_s + float(costs.stages[action.stage].seconds(action.kind))
                if action in guests:
                    guest, begun_s = guests[action], clocks[rank]
                    alone_s = float(costs.stages[guest.stage].backward_weight_s)
                    left = max(0.0, 1.0 - (start_s - begun_s) / alone_s) if alone_s else 0.0
                    end_s += left * shared_s(guest, action, costs)
                    spans[rank].append(Span(guest, begun_s, end_s if left else begun_s + alone_s))
                spans[rank].append(Span(action, start_s, end_s))
                ends[action] = clocks[rank] = end_s
                positions[rank] += 1
                progress = True
    assert all(position == len(queue) for position, queue in zip(positions, queues, strict=True)), "a checked schedule"
    return tuple(map(tuple, spans))


def as_they_run(schedule: Schedule) -> tuple[tuple[Span, ...], ...]:
    """When the actions of a schedule run, with Ws beside Bs: its `spans` where there are none."""
    if not schedule.beside:
        return schedule.spans
    guests = dict(schedule.beside)
    orders = [tuple(part for action in order for part in parts(action)) for order in schedule.ranks]
    return expected(
        schedule.costs, [Arrangement(order, {a: guests[a] for a in order if a in guests}) for order in orders]
    )


def sources_of(kind: Kind, stage: int, costs: CostTable) -> list[tuple[int, float]]:
    """The stages whose action of this kind `stage` waits for, and how long their values travel."""
    sources: list[tuple[int, float]] = []
    for edge in costs.edges:
        near = costs.placement[edge.source] == costs.placement[edge.target]
        if kind is Kind.F and edge.target == stage and edge.forward_s is not None:
            sources.append((edge.source, 0.0 if near else float(edge.forward_s)))
        if kind is Kind.B and edge.source == stage and edge.backward_s is not None:
            sources.append((edge.target, 0.0 if near else float(edge.backward_s)))
    return sources
