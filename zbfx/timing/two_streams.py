"""When actions run on a device with two streams: a W beside a B, each slower than alone, both sooner than in turn.

Takes   a cost table and an `Arrangement` per rank: its order, and the B beside which each paired W runs.
Gives   spans, the iteration time that follows from them, the most bytes that a rank holds.
Raises  nothing: orders are checked before.
Source  ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zbfx.plan import Action, CostTable, Kind, Number, Span, Timetable, parts
from zbfx.timing.prologues import prologue_spans, without_prologues
from zbfx.timing.sources import sources_of
from zbfx.timing.views import KINDS

Pairs = Mapping[Action, Action]  # each W and the B that it runs beside


@dataclass(frozen=True)
class Arrangement:
    """One rank's unfused order, in which every paired W stands right before its B."""

    order: tuple[Action, ...]
    pairs: Pairs


def iteration_s(ranks: Sequence[Sequence[Span]]) -> float:
    """The longest rank's time from its first start to its last end, prologues left out. The spans of a rank are sorted
    by start."""
    lasting = (max(span.end_s for span in spans) - spans[0].start_s for spans in without_prologues(ranks) if spans)
    return max(lasting, default=0.0)


def peak_bytes(order: Sequence[Action], costs: CostTable, pairs: Pairs) -> Number:
    """The most that a rank holds. A paired W releases what it reads when the B beside it has ended."""
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
    """Seconds that a W adds to a B that it runs beside from start to end. Without measurements these are its own."""

    def gain_s(stage: int) -> float:
        cost = costs.stages[stage]
        both_s = cost.backward_input_s + cost.backward_weight_s
        return 0.0 if cost.beside_s is None else max(0.0, float(both_s - cost.beside_s))

    alone_s = float(costs.stages[guest.stage].backward_weight_s)
    return max(0.0, alone_s - (gain_s(guest.stage) + gain_s(host.stage)) / 2)


def expected(costs: CostTable, ranks: Sequence[Arrangement]) -> tuple[tuple[Span, ...], ...]:
    """When every action runs; the spans of a rank are sorted by start. A paired W starts as soon as its rank is free,
    and has the device to itself while its B waits for input."""
    guests = {host: guest for rank in ranks for guest, host in rank.pairs.items()}
    needed = {(kind, stage): sources_of(kind, stage, costs) for kind in KINDS for stage in range(len(costs.stages))}
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in ranks]
    queues = [[action for action in rank.order if action not in rank.pairs] for rank in ranks]
    lead_s = max(map(costs.prologue_s, range(costs.rank_count)))
    positions, clocks = [0] * len(ranks), [lead_s] * len(ranks)
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


def as_they_run(schedule: Timetable) -> tuple[Sequence[Span], ...]:
    """When prologues and the actions of a schedule run, Ws beside Bs included. Without either: its `spans`."""
    spans: tuple[Sequence[Span], ...] = schedule.spans
    if schedule.beside:
        guests = dict(schedule.beside)
        orders = [tuple(part for action in order for part in parts(action)) for order in schedule.ranks]
        spans = expected(
            schedule.costs, [Arrangement(order, {a: guests[a] for a in order if a in guests}) for order in orders]
        )
    timed = replace(schedule, spans=spans)
    before = [prologue_spans(timed, rank) for rank in range(len(spans))]
    return tuple((*early, *row) for early, row in zip(before, spans, strict=True)) if any(before) else spans
