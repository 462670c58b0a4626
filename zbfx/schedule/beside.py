"""W beside B: on a device with two streams, the W of one microbatch fills what the B of another leaves idle.

The products of a W keep a GPU's arithmetic busy where a B waits for memory, and the other way round: both together take
less than one after the other. A W that stands a few actions before a B moves beside it. No other action starts later
than in the plan, so the schedule keeps its proven bound; what the W reads is held until that B has ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zbfx.plan import Action, CostTable, Kind, Number, Schedule, Span, parts

REACH = 2  # how many actions after a W its B may stand
TRIALS = 64  # simulations that choose among the pairs

Pairs = Mapping[Action, Action]  # each W and the B that it runs beside


def run_beside(schedule: Schedule, stages: frozenset[int] | None = None) -> Schedule:
    """The schedule with Ws (of `stages`, if given) beside Bs, all that fit its memory limit and do not delay it."""
    orders = [[part for action in order for part in parts(action)] for order in schedule.ranks]
    wanted: list[tuple[Action, Action]] = []
    for rank, order in enumerate(orders):
        limit = None if schedule.mem_limit is None else schedule.mem_limit[rank]
        wanted += pairs_of(order, schedule.costs, limit, stages).items()
    pairs = helpful(wanted, schedule.costs, orders)
    if not pairs:
        return schedule
    peaks = [float(peak_bytes(order, schedule.costs, pairs)) for order in orders]
    note = (
        f"{len(pairs)} of {sum(part.kind is Kind.W for order in orders for part in order)} Ws run beside a B, on a "
        f"second stream"
    )
    return replace(
        schedule,
        beside=tuple(pairs.items()),
        expected_s=makespan_s(expected(schedule.costs, orders, pairs)),
        peak_bytes=tuple(map(max, peaks, schedule.peak_bytes)),
        notes=(*schedule.notes, note),
    )


def helpful(
    wanted: Sequence[tuple[Action, Action]], costs: CostTable, orders: Sequence[Sequence[Action]]
) -> dict[Action, Action]:
    """The pairs without those that make the step longer: Ws that fill a wait are best left where they are.

    Pairs are tried in groups of neighbours, so that large schedules take no more trials than small ones.
    """
    pairs: dict[Action, Action] = {}
    best_s = makespan_s(expected(costs, orders, pairs))
    size = -(-len(wanted) // TRIALS)
    for start in range(0, len(wanted), max(1, size)):
        wider = pairs | dict(wanted[start : start + size])
        seconds = makespan_s(expected(costs, orders, wider))
        if seconds <= best_s:
            pairs, best_s = wider, seconds
    return pairs


def makespan_s(spans: Sequence[Sequence[Span]]) -> float:
    return max((span.end_s for rank in spans for span in rank), default=0.0)


def pairs_of(
    order: Sequence[Action], costs: CostTable, limit: Number | None, stages: frozenset[int] | None
) -> dict[Action, Action]:
    """The Ws of one rank that run beside a B, first to last; each B takes one."""
    pairs: dict[Action, Action] = {}
    for index, action in enumerate(order):
        if action.kind is not Kind.W or (stages is not None and action.stage not in stages):
            continue
        near = order[index + 1 : index + 1 + REACH]
        host = next((other for other in near if other.kind is Kind.B and other not in pairs.values()), None)
        # Gradients keep their bits: the Ws of a stage stay in their order.
        if host is None or any((o.kind, o.stage) == (Kind.W, action.stage) for o in near[: near.index(host)]):
            continue
        wider = {**pairs, action: host}
        if limit is None or peak_bytes(order, costs, wider) <= limit:
            pairs = wider
    return pairs


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


def expected(costs: CostTable, orders: Sequence[Sequence[Action]], pairs: Pairs) -> tuple[tuple[Span, ...], ...]:
    """When every action runs, each rank's in the order of their starts. A paired W starts when its rank would start the
    B: while that still waits for its input, the W has the device to itself."""
    guests = {host: guest for guest, host in pairs.items()}
    needed = {(kind, stage): sources_of(kind, stage, costs) for kind in Kind for stage in range(len(costs.stages))}
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    queues = [[action for action in order if action not in pairs] for order in orders]
    positions, clocks = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
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
                moved = True
    assert all(position == len(queue) for position, queue in zip(positions, queues, strict=True)), "a checked schedule"
    return tuple(map(tuple, spans))


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
