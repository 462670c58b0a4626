"""GPipe, 1F1B, the paper's ZB-H1 and ZB-H2, and interleaved 1F1B for the looped placement.

Takes   a cost table, of which only the placement counts here, and a number of microbatches.
Gives   an order of actions per rank.
Raises  `ZbfxError` for a placement that the schedule does not stand for; GPipe stands for every one.
Source  ZB-H1 and ZB-H2: section 2 of the paper. GPipe: Huang et al. 2019. 1F1B: Harlap et al. 2018. Interleaved 1F1B:
        Narayanan et al. 2021, section 2.2, in Megatron-LM's order.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbfx.errors import WrongPlacement
from zbfx.plan import Action, CostTable, Kind

Orders = tuple[Sequence[Action], ...]


def gpipe(costs: CostTable, microbatches: int) -> Orders:
    """All forwards, then all backwards, for every placement."""
    ranks = []
    for rank in range(costs.rank_count):
        stages = costs.stages_of(rank)
        forward = [Action(Kind.F, stage, j) for stage in stages for j in range(microbatches)]
        backward = [Action(Kind.BW, stage, j) for stage in reversed(stages) for j in range(microbatches)]
        ranks.append((*forward, *backward))
    return tuple(ranks)


def require_linear(name: str, costs: CostTable) -> None:
    if costs.placement != tuple(range(len(costs.stages))):
        expected = tuple(range(len(costs.stages)))
        raise WrongPlacement(
            f"{name} puts stage i on rank i: expected placement {expected}, found {costs.placement}",
            f" to {list(expected)}",
        )


def one_f_one_b(costs: CostTable, microbatches: int) -> Orders:
    """1F1B: stage i warms up with p - i Fs, then alternates BW and F. The gradient leaves after the fused backward."""
    require_linear("1f1b", costs)
    stages, m = len(costs.stages), microbatches
    ranks = []
    for stage in range(stages):
        warm_up = min(stages - stage, m)
        order = [Action(Kind.F, stage, j) for j in range(warm_up)]
        for j in range(m):
            order.append(Action(Kind.BW, stage, j))
            if warm_up + j < m:
                order.append(Action(Kind.F, stage, warm_up + j))
        ranks.append(tuple(order))
    return tuple(ranks)


def delayed_w(stage: int, microbatches: int, warm_up: int, delay: int) -> tuple[Action, ...]:
    """`warm_up` Fs, then rounds of B, W, F in which W lags `delay` Bs behind; B and W alternate after the last F."""
    warm_up = min(warm_up, microbatches)
    order = [Action(Kind.F, stage, j) for j in range(warm_up)]
    next_w = 0
    for j in range(microbatches):
        order.append(Action(Kind.B, stage, j))
        forward = warm_up + j
        if j >= delay or forward >= microbatches:
            order.append(Action(Kind.W, stage, next_w))
            next_w += 1
        if forward < microbatches:
            order.append(Action(Kind.F, stage, forward))
    order.extend(Action(Kind.W, stage, j) for j in range(next_w, microbatches))
    return tuple(order)


def zb_h1(costs: CostTable, microbatches: int) -> Orders:
    """ZB-H1 (section 2.1): 1F1B's warm-up, and stage i's Ws i Bs late."""
    require_linear("zb-h1", costs)
    stages = len(costs.stages)
    return tuple(delayed_w(i, microbatches, stages - i, i) for i in range(stages))


def zb_h2(costs: CostTable, microbatches: int) -> Orders:
    """ZB-H2 (section 2.2): 2(p - i) - 1 Fs of warm-up, and stage i's Ws 2i Bs late."""
    require_linear("zb-h2", costs)
    stages = len(costs.stages)
    return tuple(delayed_w(i, microbatches, 2 * (stages - i) - 1, 2 * i) for i in range(stages))


def looped_placement(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stage i on rank i mod p."""
    return tuple(range(ranks)) * stages_per_rank


def interleaved_1f1b(costs: CostTable, microbatches: int) -> Orders:
    """1F1B over virtual microbatches: groups of p microbatches go through one stage of a rank, then through the next.
    Rank r warms up with 2(p - r - 1) + (v - 1) p Fs. Backwards are fused, as in Megatron-LM. A last group that is not
    full is cut out of a full one, which keeps the order free of deadlock."""
    p, count = costs.rank_count, len(costs.stages)
    if count == p or count % p or costs.placement != looped_placement(p, count // p):
        raise WrongPlacement(
            f"interleaved-1f1b puts stage i on rank i mod p, the same number of stages on each, two or more: found "
            f"placement {costs.placement}",
            ", for two ranks [0, 1, 0, 1]",
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
