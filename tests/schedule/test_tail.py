"""The end of an order with sums over replicas: times by hand, orders of buckets by brute force.

Run: pytest tests/schedule/test_tail.py (no torch, no model).
"""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from zbfx.plan import CostTable, StageCost
from zbfx.schedule import plan
from zbfx.schedule.tail import Portion, best_tail, ending_with, endings, johnson, tail_of

COSTS = CostTable.chain([StageCost(2, 3, 5, saved_bytes=2, weight_saved_bytes=1)] * 2, comm_s=7)


def portion(weight_s: float, reduce_s: float, stage: int = 0) -> Portion:
    return Portion({stage: weight_s}, frozenset(), reduce_s)


def end_of(order: tuple[int, ...], jobs: dict[int, tuple[float, float]]) -> float:
    work = sums = 0.0
    for job in order:
        work += jobs[job][0]
        sums = max(sums, work) + jobs[job][1]
    return sums


@pytest.mark.parametrize("seed", range(20))
def test_johnsons_order_ends_first(seed: int) -> None:
    draw = random.Random(seed)
    jobs = {k: (draw.randrange(6), draw.randrange(1, 6)) for k in range(5)}
    ends = [end_of(order, jobs) for order in permutations(jobs)]  # type: ignore[arg-type]
    assert end_of(tuple(johnson(jobs)), jobs) == min(ends)  # type: ignore[arg-type]


def test_times_of_a_tail_by_hand() -> None:
    """gpipe on two stages, two microbatches: rank 1 does F0 F1 BW0 BW1 from 9 to 29, the last W from 24 to 29."""
    schedule = plan(COSTS, 2, schedule="gpipe")
    whole, last, both = endings(schedule, 1)
    assert (whole.trailing, whole.end_s) == (0, 29)
    assert (last.trailing, last.begin_s, last.end_s) == (1, 24, 29)
    assert (both.trailing, both.begin_s, both.end_s) == (2, 19, 29)
    portions = [portion(1, 2, stage=1), portion(4, 3, stage=1)]
    # Whole: both sums wait for 29. One W: 1 to 25, summed to 27; 4 to 29, summed to 32. Two Ws: 21, 23; 29, 32.
    assert tail_of(whole, portions).sums_s == ((29, 31), (31, 34))
    assert tail_of(last, portions).sums_s == ((25, 27), (29, 32))
    assert tail_of(both, portions).sums_s == ((21, 23), (29, 32))
    best = best_tail([whole, last, both], portions)
    assert (best.ending.trailing, best.exposed_s, best.sequence) == (1, 3, (0, 1)), "the fewest Ws among equals"


def test_more_ws_are_put_off_where_sums_are_long() -> None:
    """Sums of 8 and 1: one W in parts hides 5 less 1 of the first, two hide 8."""
    schedule = plan(COSTS, 2, schedule="gpipe")
    best = best_tail(endings(schedule, 1), [portion(1, 8, stage=1), portion(4, 1, stage=1)])
    assert (best.ending.trailing, best.sums_s) == (2, ((21, 29), (29, 30)))
    whole = best_tail(endings(schedule, 0)[:1], [portion(1, 8), portion(4, 1)])
    other = ending_with(schedule, [whole, best])
    assert [str(action) for action in other.ranks[1]] == ["F1.0", "F1.1", "B1.0", "B1.1", "W1.0", "W1.1"]
    assert other.ranks[0] == schedule.ranks[0]


def test_memory_limit_keeps_ws_where_they_are() -> None:
    """Each W that waits holds 2, as each F does: beside the two Fs in flight there is no room for a third W."""
    tight = CostTable.chain([StageCost(2, 3, 5, saved_bytes=2, weight_saved_bytes=2)] * 2, comm_s=7)
    for limit, allowed in ((4, [0, 1, 2]), (6, [0, 1, 2, 3]), (8, [0, 1, 2, 3, 4]), (None, [0, 1, 2])):
        schedule = plan(tight, 4, schedule="1f1b", mem_limit=limit)
        assert [ending.trailing for ending in endings(schedule, 0)] == allowed, limit


def test_sums_are_hidden_where_the_last_work_adds_to_none() -> None:
    """Gradients that come in B are final before the last W starts, which is longer than their sum."""
    schedule = plan(COSTS, 3, schedule="zb-h1")
    tail = best_tail(endings(schedule, 0), [Portion({}, frozenset({0}), 4.0)])
    assert tail.exposed_s == 0
    assert tail.sums_s[0][0] == max(end for (kind, _), end in tail.ending.finished_s.items() if kind == "B")
