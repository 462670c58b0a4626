"""What microbatches that cost unlike amounts cost, on which ranks, within which memory.

Takes   a cost table for each microbatch, all with one placement, and what each rank may hold.
Gives   an `Unlike`, which has the costs by stage and microbatch.
Raises  nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zbfx.plan import CostTable, Edge, StageCost

ByMicrobatch = list[list[float]]  # by stage and microbatch
Lags = list[float]  # by microbatch, in seconds


@dataclass(frozen=True)
class Unlike:
    """The costs of a step's microbatches, and the bytes that each rank may hold beside static ones; None: any."""

    tables: tuple[CostTable, ...]
    limits: tuple[float, ...] | None = None

    @property
    def placement(self) -> tuple[int, ...]:
        return self.tables[0].placement

    @property
    def rank_count(self) -> int:
        return self.tables[0].rank_count

    @cached_property
    def stages(self) -> list[list[int]]:
        """By rank, later stages first: their Bs gate every earlier stage's."""
        found: list[list[int]] = [[] for _ in range(self.rank_count)]
        for stage in reversed(range(len(self.placement))):
            found[self.placement[stage]].append(stage)
        return found

    def column(self, value: Callable[[StageCost], object]) -> ByMicrobatch:
        return [[float(value(table.stages[s])) for table in self.tables] for s in range(len(self.placement))]  # type: ignore[arg-type]

    @cached_property
    def seconds(self) -> tuple[ByMicrobatch, ByMicrobatch, ByMicrobatch]:
        """Of F, B and W."""
        return (
            self.column(lambda stage: stage.forward_s),
            self.column(lambda stage: stage.backward_input_s),
            self.column(lambda stage: stage.backward_weight_s),
        )

    @cached_property
    def held(self) -> tuple[ByMicrobatch, ByMicrobatch]:
        """Bytes from F until B, and from B until W."""
        return self.column(lambda stage: stage.saved_bytes), self.column(lambda stage: stage.weight_saved_bytes)

    @cached_property
    def sources(self) -> tuple[list[list[tuple[int, Lags]]], list[list[tuple[int, Lags]]]]:
        """By stage, the stages that its F, and its B, wait for, and how long values travel, by microbatch."""
        forward: list[list[tuple[int, Lags]]] = [[] for _ in self.placement]
        backward: list[list[tuple[int, Lags]]] = [[] for _ in self.placement]
        by_pair = [{(edge.source, edge.target): edge for edge in table.edges} for table in self.tables]
        for low, high in sorted(set().union(*by_pair)):
            edges = [pairs.get((low, high)) for pairs in by_pair]
            here = self.placement[low] == self.placement[high]
            there, back = lags_of(edges, here, True), lags_of(edges, here, False)
            if there is not None:
                forward[high].append((low, there))
            if back is not None:
                backward[low].append((high, back))
        return forward, backward

    @cached_property
    def targets(self) -> tuple[list[list[tuple[int, int, int, Lags]]], list[list[tuple[int, int, int, Lags]]]]:
        """By stage, what waits for its F, and for its B: the kind (0 for F, 1 for B), the stage, its rank, and how long
        values travel. The last stages' Bs wait for their own F."""
        found: list[list[list[tuple[int, int, int, Lags]]]] = [[[] for _ in self.placement] for _ in range(2)]
        for kind, table in enumerate(self.sources):
            for stage, sources in enumerate(table):
                for source, lags in sources:
                    found[kind][source].append((kind, stage, self.placement[stage], lags))
        for stage in range(len(self.placement)):
            found[0][stage].append((1, stage, self.placement[stage], [0.0] * len(self.tables)))
        return found[0], found[1]

    @cached_property
    def source_counts(self) -> tuple[list[int], list[int]]:
        """By stage, for how many actions its F, and its B, wait."""
        forward, backward = self.sources
        return [len(found) for found in forward], [len(found) + 1 for found in backward]

    @cached_property
    def work(self) -> list[float]:
        """Seconds of the Fs and Bs of a microbatch on all stages."""
        f, b, _ = self.seconds
        return [sum(f[s][k] + b[s][k] for s in range(len(f))) for k in range(len(self.tables))]

    def mean(self) -> CostTable:
        """The costs of a microbatch on average: so many of these take as long on every rank."""
        first, count = self.tables[0], len(self.tables)
        f, b, w = self.seconds
        saved, later = self.held
        stages = tuple(
            StageCost(
                sum(f[s]) / count,
                sum(b[s]) / count,
                sum(w[s]) / count,
                saved_bytes=sum(saved[s]) / count,
                weight_saved_bytes=sum(later[s]) / count,
                static_bytes=stage.static_bytes,
                transient_bytes=max(table.stages[s].transient_bytes for table in self.tables),
                prologue_s=stage.prologue_s,
            )
            for s, stage in enumerate(first.stages)
        )
        forward, backward = self.sources
        there = {(s, t): sum(lag) / count for t, found in enumerate(forward) for s, lag in found}
        back = {(s, t): sum(lag) / count for s, found in enumerate(backward) for t, lag in found}
        edges = tuple(Edge(*pair, there.get(pair), back.get(pair)) for pair in sorted(there.keys() | back.keys()))
        return CostTable(stages, edges, first.placement)


def lags_of(edges: Sequence[Edge | None], here: bool, there: bool) -> list[float] | None:
    """How long values travel one way, by microbatch; None: nothing is sent that way."""
    found = [None if edge is None else edge.forward_s if there else edge.backward_s for edge in edges]
    if all(lag is None for lag in found):
        return None
    return [0.0 if here or lag is None else float(lag) for lag in found]


def activation_limits(tables: Sequence[CostTable], limits: Sequence[float] | None) -> tuple[float, ...] | None:
    """What limits in bytes per rank leave beside what is held throughout, and the most that an action needs inside."""
    if limits is None:
        return None
    return tuple(
        most
        - sum(float(tables[0].stages[s].static_bytes) for s in own)
        - max(float(table.stages[s].transient_bytes) for table in tables for s in own)
        for rank, most in enumerate(limits)
        for own in [tables[0].stages_of(rank)]
    )


def limits_of_multiple(tables: Sequence[CostTable], multiple: float) -> tuple[float, ...]:
    """So many times the activation bytes that 1F1B holds at most, whichever microbatch goes first: on the rank that
    holds most, those of as many microbatches as there are ranks, the largest. At least those of one microbatch."""
    ranks = range(tables[0].rank_count)
    held = [[sum(float(table.stages[s].saved_bytes) for s in table.stages_of(r)) for table in tables] for r in ranks]
    allowed = multiple * max(sum(sorted(own)[-len(ranks) :]) for own in held)
    return tuple(max(allowed, *own) for own in held)
