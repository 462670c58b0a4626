"""A joint graph and a placement -> stages, at every level of recomputation, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from zbfx.costs.clock import SHORT_WARM_S
from zbfx.costs.estimate import Costed, Hardware
from zbfx.costs.measure import Conditions, cost_table
from zbfx.fit import Forms
from zbfx.graphs import Joint, Placed
from zbfx.passes.extract import extract
from zbfx.passes.partition import partition
from zbfx.passes.recompute import Level, recompute
from zbfx.passes.split import split, unsplit_notes
from zbfx.plan import CostTable, Kind

Seconds = Callable[[fx.Node], float]


@dataclass(frozen=True)
class Cutting:
    """How stages are cut from `joint`, and where their costs come from: nodes take `node_s`, stages what `costs` says,
    measured under `conditions`. Pipelines of `ranks` ranks begin with the level of recomputation `first`; `random`:
    phases get seeds; `rebalance`: stages are cut again once they are measured."""

    joint: Joint
    ranks: int
    hardware: Hardware
    node_s: Seconds
    cuts: Sequence[str] | None
    costs: CostTable | str
    conditions: Conditions
    first: Level
    random: bool
    rebalance: bool

    def forms(self, placement: Sequence[int]) -> Forms:
        """The stages of a placement."""
        placed = self.placed(placement, self.node_s)
        forms = self.stages_of(placed, placement)
        if not self.rebalance:
            return forms
        again = self.placed(placement, corrected(self.node_s, placed, forms.whole(self.first).costs))
        return min(forms, self.stages_of(again, placement), key=lambda one: heaviest_s(one.whole(self.first).costs))

    def placed(self, placement: Sequence[int], seconds: Seconds) -> Placed:
        speed = self.hardware.link_bytes_per_s
        return partition(self.joint, placement, seconds=seconds, bytes_per_s=speed, cuts=self.cuts)

    def stages_of(self, placed: Placed, placement: Sequence[int]) -> Forms:
        divided = split(placed)

        def at(level: Level) -> Costed:
            levels = [level] * len(placement)
            graphs = extract(recompute(divided, levels, in_flight=self.ranks, random=self.random))
            conditions = self.conditions if level == self.first else replace(self.conditions, warm_s=SHORT_WARM_S)
            return cost_table(self.costs, graphs, placement, self.hardware, conditions)

        return Forms(at, tuple(unsplit_notes(divided)))


def corrected(node_s: Seconds, placed: Placed, costs: CostTable) -> Seconds:
    """Seconds of the nodes of which those of a stage add up to what the stage takes: how fast its rank's device is, and
    what its compiled phases save, is in them."""
    stage_of = {node.name: stage for node, stage in placed.stage_of.items()}
    sums: dict[int, float] = defaultdict(float)
    for node, stage in placed.stage_of.items():
        sums[stage] += node_s(node)
    factors = {stage: stage_s(costs, stage) / total for stage, total in sums.items() if total > 0}
    return lambda node: node_s(node) * factors.get(stage_of.get(node.name, -1), 1.0)


def stage_s(costs: CostTable, stage: int) -> float:
    return float(sum(costs.stages[stage].seconds(kind) for kind in (Kind.F, Kind.B, Kind.W)))


def heaviest_s(costs: CostTable) -> float:
    """Seconds of a microbatch on the rank that takes longest."""
    loads: dict[int, float] = defaultdict(float)
    for stage, rank in enumerate(costs.placement):
        loads[rank] += stage_s(costs, stage)
    return max(loads.values())
