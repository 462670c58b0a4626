"""A block of one microbatch, repeated for every microbatch.

Takes   when each action of a microbatch starts, and how long after it the next microbatch's starts.
Gives   an order of actions per rank: all blocks, each rank's actions by their time.
Raises  `ZbfxError` for a block that lacks an action.
Source  Qi et al. 2024, "Pipeline Parallelism with Controllable Memory".
"""

from __future__ import annotations

from collections.abc import Mapping

from zbfx.errors import ZbfxError
from zbfx.plan import Action, CostTable, Kind, Number
from zbfx.schedule.orders.handmade import Orders

KIND_ORDER = (Kind.B, Kind.F, Kind.W, Kind.BW)  # which goes first where two blocks have actions at one time


def repeat_block(costs: CostTable, microbatches: int, block: Mapping[str, Number], every: Number) -> Orders:
    """`block` says when each action of microbatch 0 starts, in any unit: `{"F0.0": 0, "F1.0": 1, "B1.0": 2, ...}`.
    Microbatch j starts `every` times j later. Each rank runs its actions in the order of their starts; when they start
    then follows from the costs."""
    timed = {Action.parse(text): time for text, time in block.items()}
    for stage in range(len(costs.stages)):
        kinds = {action.kind for action in timed if action.stage == stage and action.microbatch == 0}
        if kinds not in ({Kind.F, Kind.B, Kind.W}, {Kind.F, Kind.BW}):
            raise ZbfxError(
                f"a block has F, B and W, or F and BW, of microbatch 0 of every stage; of stage {stage} it has "
                f"{', '.join(sorted(kinds)) or 'nothing'}"
            )
    if others := [str(a) for a in timed if a.microbatch != 0 or a.stage >= len(costs.stages)]:
        raise ZbfxError(f"a block has actions of microbatch 0 of {len(costs.stages)} stages; found {others[0]}")
    ranks = []
    for rank in range(costs.rank_count):
        own = [(time, action) for action, time in timed.items() if costs.placement[action.stage] == rank]
        entries = sorted(
            (time + every * j, KIND_ORDER.index(action.kind), action.stage, j)
            for time, action in own
            for j in range(microbatches)
        )
        ranks.append(tuple(Action(KIND_ORDER[kind], stage, j) for _, kind, stage, j in entries))
    return tuple(ranks)
