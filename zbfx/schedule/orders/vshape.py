"""Schedules for the V placement: two stages per rank, down the ranks and back up.

Takes   a cost table, of which only the placement counts here, and a number of microbatches.
Gives   an order of actions per rank.
Raises  `ZbfxError` for another placement.
Source  ZB-V: section 6 of the paper. V-Half and V-Min: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory".
"""

from __future__ import annotations

from zbfx.errors import WrongPlacement, ZbfxError
from zbfx.plan import Action, CostTable, Kind
from zbfx.schedule.orders.handmade import Orders
from zbfx.schedule.orders.reordered import reordered

Letter = tuple[Kind, int]  # and a stage


def v_placement(ranks: int) -> tuple[int, ...]:
    """Stages 0 to p - 1 down the ranks, p to 2p - 1 back up: a microbatch's forward ends on rank 0, where it began."""
    return (*range(ranks), *reversed(range(ranks)))


def require_v(name: str, costs: CostTable) -> None:
    count = len(costs.stages)
    if count % 2:
        raise ZbfxError(f"{name} puts two stages on each rank in a V: expected an even number of stages, found {count}")
    expected = v_placement(count // 2)
    if costs.placement != expected:
        raise WrongPlacement(
            f"{name} puts two stages on each rank in a V: expected placement {expected}, found {costs.placement}",
            f" to {list(expected)}",
        )


def zb_v(costs: CostTable, microbatches: int, extra: int = 0) -> Orders:
    """The paper's order for equal times (section 6): zero bubble at 1F1B's memory. Rank i warms up with 2(p - i) - 1 Fs
    of its first stage and i pairs of second-stage and first-stage F; p - i rounds of F, B, W of the second stage
    follow, then rounds of F, B, W of either stage in turn until the Fs run out; the Ws of the last Bs fill the end."""
    orders = []
    for letters in zb_v_letters(costs, microbatches, extra):
        done = dict.fromkeys(letters, 0)
        order = []
        for letter in letters:
            if done[letter] < microbatches:
                order.append(Action(*letter, done[letter]))
                done[letter] += 1
        orders.append(tuple(order))
    return tuple(orders)


def zb_v_letters(costs: CostTable, microbatches: int, extra: int = 0) -> list[list[Letter]]:
    """Per rank the kinds and stages of `zb_v`. Each runs the microbatches in ascending order; beyond the last one it is
    left out."""
    require_v("zb-v-order", costs)
    p = costs.rank_count
    whole = max(microbatches, 2 * p - 1 + extra)  # with fewer microbatches it is cut out of the shortest whole one
    found = []
    for rank in range(p):
        (f0, b0, w0), (f1, b1, w1) = (
            [(kind, stage) for kind in (Kind.F, Kind.B, Kind.W)] for stage in (rank, 2 * p - 1 - rank)
        )
        found.append(
            [
                *[f0] * (2 * (p - rank) - 1 + extra),
                *[f1, f0] * rank,
                *[f1, b1, w1] * (p - rank),
                *[f0, b0, w0, f1, b1, w1] * (whole - p),
                *[b0, b1] * rank,
                *[b0, w0] * (p - rank),
                *[w1] * whole,
                *[w0] * whole,
            ]
        )
    return found


def v_half(costs: CostTable, microbatches: int) -> Orders:
    """V-Half (Qi et al. 2024): about half of 1F1B's memory."""
    require_v("v-half", costs)
    p = costs.rank_count
    wait = 0 if p % 2 else 3  # else blocks of consecutive microbatches collide on ranks
    turn, back = 3 * p - 2, 3 * p - 1 + wait
    return reordered([(2 * r, turn - r, back + 2 * r, back + turn + 1 - r) for r in range(p)], microbatches)


def v_min(costs: CostTable, microbatches: int) -> Orders:
    """V-Min (Qi et al. 2024): about a third of 1F1B's memory, the least with F and B never waiting."""
    require_v("v-min", costs)
    p = costs.rank_count
    wait = 0 if p % 3 else 2  # else blocks of consecutive microbatches collide on ranks
    turn, back = 2 * p - 1, 2 * p + wait
    return reordered([(r, turn - r, back + r, back + turn - r) for r in range(p)], microbatches)
