"""The order of forwards alone: how long it takes, and what waits in it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from zbfx.plan import CostTable, Kind, StageCost
from zbfx.schedule.forward import forward_schedule
from zbfx.schedule.orders.registry import V

F, COMM = 2, 7


def table(stages: int, comm: float = 0.0, placement: tuple[int, ...] | None = None) -> CostTable:
    return CostTable.chain([StageCost(F, 3, 5)] * stages, comm, placement)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 16), (4, 16), (8, 5)])
def test_equal_stages_take_m_plus_p_minus_1_forwards(ranks: int, microbatches: int) -> None:
    found = forward_schedule(table(ranks), microbatches)
    assert found.makespan_s == F * (microbatches + ranks - 1)
    assert {action.kind for order in found.ranks for action in order} == {Kind.F}


def test_messages_of_a_hundredth_of_a_forward_leave_99_percent_of_the_rate() -> None:
    """Of m / (m + p - 1), the rate without a bubble, at p=2 and m=16."""
    found = forward_schedule(table(2, F / 100), 16)
    assert F * 16 / found.makespan_s >= 0.99 * 16 / 17


def test_long_messages_are_hidden() -> None:
    """After the first has come, the second rank never waits: 2 + 7 + 16 * 2 = 41."""
    assert forward_schedule(table(2, COMM), 16).makespan_s == F + COMM + 16 * F


def test_messages_that_wait_are_few() -> None:
    """Where one takes a hundred forwards, eight are on their way at most."""
    first, last = ([span.start_s for span in spans] for spans in forward_schedule(table(2, 100 * F), 30).spans)
    assert all(first[k] >= last[k - 8] for k in range(8, 30))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_v_is_as_busy(ranks: int) -> None:
    """Two stages a rank: 2 m forwards on each, and 2 p - 2 pass before the last rank is busy."""
    found = forward_schedule(table(2 * ranks, placement=V.placement(ranks, 2)), 16)
    assert found.makespan_s <= F * (2 * 16 + 2 * ranks - 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_fast_stage_waits_for_the_next_one(ranks: int) -> None:
    """A stage begins a microbatch once the next has begun the one before the last: messages do not pile up."""
    costs = CostTable.chain([StageCost(F / 10, 3, 5)] * (ranks - 1) + [StageCost(F, 3, 5)])
    starts = [[span.start_s for span in spans] for spans in forward_schedule(costs, 9).spans]
    for fast, slow in pairwise(starts):
        assert all(fast[k] >= slow[k - 2] for k in range(2, 9))
    assert starts[-1] == [starts[-1][0] + F * k for k in range(9)], "the slowest stage never waits"
