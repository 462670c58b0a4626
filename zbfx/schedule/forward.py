"""The order of forwards alone, as evaluation and `step.forward` run them.

Takes   a cost table and a number of microbatches.
Gives   a `Schedule` without Bs and Ws. Of what can run next, ranks run what can start first, of later stages before
        earlier ones: results leave as soon as they can. A stage stays close to the next one. It begins a microbatch
        once the next stage has begun one that is as far behind as hides the message between them: 2, and 8 at most. So
        no rank holds more than the microbatch that it computes and those messages, however many microbatches come.
Raises  nothing. Source: list scheduling; with equal stages and no time for messages it takes m + p - 1 forwards, the
        least possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from zbfx.plan import Action, CostTable, Kind, Span
from zbfx.schedule.schedule import Schedule
from zbfx.timing.simulate import simulate

AHEAD = 2  # microbatches by which a stage may be ahead of the next one: one is computed, one is read
MOST_AHEAD = 8  # where messages take longer than forwards


def forward_schedule(costs: CostTable, microbatches: int) -> Schedule:
    """The forwards of all stages and microbatches."""
    spans = listed_forwards(costs, microbatches)
    ranks = tuple(tuple(span.action for span in of_rank) for of_rank in spans)
    peaks = simulate(costs, microbatches, ranks).peak_bytes
    return Schedule("forward", costs, microbatches, ranks, spans, peaks)


def listed_forwards(costs: CostTable, microbatches: int) -> tuple[tuple[Span, ...], ...]:
    """When every rank runs what."""
    placement, seconds = costs.placement, [float(stage.forward_s) for stage in costs.stages]
    sources: list[list[tuple[int, float]]] = [[] for _ in placement]
    for edge in costs.edges:
        if edge.forward_s is not None:
            comm_s = 0.0 if placement[edge.source] == placement[edge.target] else float(edge.forward_s)
            sources[edge.target].append((edge.source, comm_s))
    ahead = allowed_ahead(costs)
    starts: list[list[float]] = [[] for _ in placement]  # by stage and microbatch
    free_s = [0.0] * costs.rank_count
    spans: list[list[Span]] = [[] for _ in free_s]

    def ready_s(stage: int) -> float | None:
        """When a stage can run its next microbatch; None: not before others have run."""
        k = len(starts[stage])
        if k == microbatches or any(len(starts[source]) <= k for source, _ in sources[stage]):
            return None
        waits = [free_s[placement[stage]]]
        waits += [starts[source][k] + seconds[source] + comm_s for source, comm_s in sources[stage]]
        if stage + 1 < len(placement) and (behind := k - ahead[stage]) >= 0:
            if len(starts[stage + 1]) <= behind:
                return None
            waits.append(starts[stage + 1][behind])
        return max(waits)

    def ready() -> Iterator[tuple[float, int]]:
        for stage in range(len(placement)):
            if (at_s := ready_s(stage)) is not None:
                yield at_s, -stage

    for _ in range(len(placement) * microbatches):
        start_s, negative = min(ready())
        stage, rank = -negative, placement[-negative]
        free_s[rank] = start_s + seconds[stage]
        spans[rank].append(Span(Action(Kind.F, stage, len(starts[stage])), start_s, free_s[rank]))
        starts[stage].append(start_s)
    return tuple(map(tuple, spans))


def allowed_ahead(costs: CostTable) -> list[int]:
    """By how many microbatches each stage may be ahead of the next one: as many as hide the message between them."""
    slowest_s = max(sum(float(costs.stages[s].forward_s) for s in costs.stages_of(r)) for r in range(costs.rank_count))
    comm_s = {edge.source: float(edge.forward_s or 0) for edge in costs.edges if edge.target == edge.source + 1}
    found = []
    for stage, cost in enumerate(costs.stages):
        hidden_s = float(cost.forward_s) + comm_s.get(stage, 0.0)
        found.append(min(max(AHEAD, ceil(hidden_s / slowest_s)), MOST_AHEAD) if slowest_s else AHEAD)
    return found
