"""What an action waits for.

Takes   a cost table.
Gives   the actions whose results an action needs, and how long these travel.
Raises  nothing.
Source  appendix G of the paper, (formula:Fdep) and (formula:Bdep).
"""

from __future__ import annotations

from collections.abc import Iterator

from zbfx.plan import Action, CostTable, Kind, parts


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


class Sources:
    """The actions that an action needs. A fused backward BW counts as its B, and gives what its B gives."""

    def __init__(self, costs: CostTable) -> None:
        kinds = (Kind.F, Kind.B, Kind.W)
        self.found = {(kind, s): sources_of(kind, s, costs) for kind in kinds for s in range(len(costs.stages))}

    def elsewhere(self, action: Action) -> Iterator[tuple[Action, float]]:
        """Those of other stages, each with the seconds that its result travels."""
        kind = parts(action)[0].kind
        for stage, lag_s in self.found[kind, action.stage]:
            yield Action(kind, stage, action.microbatch), lag_s

    def of_stage(self, action: Action) -> Iterator[Action]:
        """That of its own stage: an F before a B, a B before a W."""
        kind = parts(action)[0].kind
        if kind is not Kind.F:
            yield Action(Kind.F if kind is Kind.B else Kind.B, action.stage, action.microbatch)
