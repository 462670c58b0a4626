"""Interleaved 1F1B, for the looped placement.

Takes   a cost table, of which only the placement counts here, and a number of microbatches.
Gives   an order of actions per rank, with fused backwards.
Raises  `ZbfxError` for another placement.
Source  Narayanan et al. 2021, section 2.2, in Megatron-LM's order.
"""

from __future__ import annotations

from zbfx.errors import ZbfxError
from zbfx.plan import Action, CostTable, Kind
from zbfx.schedule.orders.handmade import Orders


def looped_placement(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stage i on rank i mod p."""
    return tuple(range(ranks)) * stages_per_rank


def interleaved_1f1b(costs: CostTable, microbatches: int) -> Orders:
    """1F1B over virtual microbatches: groups of p microbatches go through one stage of a rank, then through the next.

    Rank r warms up with 2(p - r - 1) + (v - 1) p Fs. Backwards are fused, as in Megatron-LM. A last group that is not
    full is cut out of a full one, which keeps the order free of deadlock.
    """
    p, count = costs.rank_count, len(costs.stages)
    if count == p or count % p or costs.placement != looped_placement(p, count // p):
        raise ZbfxError(
            f"interleaved-1f1b puts stage i on rank i mod p, the same number of stages on each, two or more: found "
            f"placement {costs.placement}. Set the field placement of the cost table, for two ranks [0, 1, 0, 1]"
        )
    chunks = count // p
    virtual = [(chunk, first + j) for first in range(0, microbatches, p) for chunk in range(chunks) for j in range(p)]
    ranks = []
    for rank in range(p):
        forward = [Action(Kind.F, chunk * p + rank, j) for chunk, j in virtual]
        backward = [Action(Kind.BW, (chunks - 1 - chunk) * p + rank, j) for chunk, j in virtual]
        warm_up = min(len(forward), 2 * (p - rank - 1) + (chunks - 1) * p)
        order = forward[:warm_up]
        for index, action in enumerate(backward):
            order += forward[warm_up + index : warm_up + index + 1]
            order.append(action)
        ranks.append(tuple(action for action in order if action.microbatch < microbatches))
    return tuple(ranks)
