"""Schedules for the V placement: two stages per rank, down the ranks and back up (section 6)."""

from __future__ import annotations

from zbfx.errors import ZbfxError
from zbfx.plan import Action, CostTable, Kind
from zbfx.schedule.handmade import Ranks


def v_placement(ranks: int) -> tuple[int, ...]:
    """Stages 0 to p - 1 down the ranks, p to 2p - 1 back up: each microbatch's forward ends, and its backward begins, on rank 0."""
    return (*range(ranks), *reversed(range(ranks)))


def require_v(name: str, costs: CostTable) -> None:
    expected = v_placement(len(costs.stages) // 2)
    if costs.placement != expected:
        raise ZbfxError(
            f"{name} puts two stages on each rank in a V: expected placement {expected}, found {costs.placement}"
        )


def zb_v(costs: CostTable, microbatches: int) -> Ranks:
    """The paper's order for equal times (section 6): zero bubble at 1F1B's memory.

    Rank i warms up with 2(p - i) - 1 Fs of its first stage and i pairs of second-stage and first-stage F; p - i rounds of
    F, B, W of the second stage follow, then rounds of F, B, W of either stage in turn until the Fs run out; the Ws of the
    last Bs fill the end.
    """
    require_v("zb-v", costs)
    p = costs.rank_count
    # With fewer microbatches the pattern is cut out of the shortest whole one.
    whole = max(microbatches, 2 * p - 1)
    return tuple(
        tuple(action for action in _zb_v_rank(p, rank, whole) if action.microbatch < microbatches) for rank in range(p)
    )


def _zb_v_rank(p: int, rank: int, microbatches: int) -> list[Action]:
    stages = rank, 2 * p - 1 - rank
    order: list[Action] = []
    done = {(kind, half): 0 for kind in (Kind.F, Kind.B, Kind.W) for half in (0, 1)}

    def run(half: int, *kinds: Kind) -> None:
        for kind in kinds:
            if done[kind, half] < microbatches:
                order.append(Action(kind, stages[half], done[kind, half]))
                done[kind, half] += 1

    for _ in range(2 * (p - rank) - 1):
        run(0, Kind.F)
    for _ in range(rank):
        run(1, Kind.F)
        run(0, Kind.F)
    for _ in range(p - rank):
        run(1, Kind.F, Kind.B, Kind.W)
    while done[Kind.F, 1] < microbatches:
        run(0, Kind.F, Kind.B, Kind.W)
        run(1, Kind.F, Kind.B, Kind.W)
    for _ in range(rank):
        run(0, Kind.B)
        run(1, Kind.B)
    for _ in range(p - rank):
        run(0, Kind.B, Kind.W)
    for half in (1, 0):
        while done[Kind.W, half] < microbatches:
            run(half, Kind.W)
    return order
