"""Ws beside Bs: how a rank is arranged, what it holds, and when its actions then run; by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zbfx.plan import Action, CostTable, Kind, Span, StageCost, parts
from zbfx.schedule import plan, simulate
from zbfx.schedule.beside import in_place, moved, run_beside
from zbfx.schedule.schedule import Schedule
from zbfx.timing.two_streams import Arrangement, expected, iteration_s, peak_bytes

# F=2, B=3, W=5, B with a W beside it 6: a pair takes 6 where its actions take 8.
STAGE = StageCost(2, 3, 5, saved_bytes=4, weight_saved_bytes=3, static_bytes=100, beside_s=6)
ONE = CostTable.chain([STAGE])
TWO = CostTable.chain([STAGE, replace(STAGE, forward_s=4)], comm_s=7)

parse = Action.parse


def actions(text: str) -> list[Action]:
    return list(map(Action.parse, text.split()))


def paired(text: str) -> Arrangement:
    """A rank's order with every W beside the B after it, written like "W0.0+B0.1"."""
    order = actions(text.replace("+", " "))
    words = [word.partition("+") for word in text.split() if "+" in word]
    return Arrangement(tuple(order), {parse(guest): parse(host) for guest, _, host in words})


def scheduled(costs: CostTable, *ranks: str, mem_limit: float | None = None) -> Schedule:
    return plan(costs, ranks[0].count("F"), schedule=ranks, mem_limit=mem_limit)


def spans(costs: CostTable, *ranks: str) -> dict[str, tuple[float, float]]:
    timed = expected(costs, [paired(rank) for rank in ranks])
    return {str(span.action): (span.start_s, span.end_s) for rank in timed for span in rank}


@pytest.mark.parametrize(
    ("lag", "text"),
    [
        (1, "F0.0 F0.1 B0.0 F0.2 W0.0+B0.1 W0.1+B0.2 W0.2"),
        (2, "F0.0 F0.1 B0.0 F0.2 B0.1 W0.0+B0.2 W0.1 W0.2"),
        (3, "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 W0.0 W0.1 W0.2"),
    ],
)
def test_every_w_moves_beside_a_later_b(lag: int, text: str) -> None:
    order = actions("F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2")
    assert moved(order, lag, None) == paired(text)


def test_in_place_only_neighbours_pair() -> None:
    order = actions("F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2")
    assert in_place(order, None) == paired("F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1+B0.2 W0.2")


def test_stages_that_may_not_run_beside_others_run_before() -> None:
    order = actions("F0.0 B0.0 W0.0 F0.1 B0.1 W0.1")
    assert moved(order, 1, frozenset({1})) == paired("F0.0 B0.0 F0.1 W0.0 B0.1 W0.1")


def test_what_a_w_reads_is_held_until_its_b_has_ended() -> None:
    serial, beside = paired("F0.0 B0.0 W0.0 F0.1 B0.1 W0.1"), paired("F0.0 B0.0 F0.1 W0.0+B0.1 W0.1")
    assert peak_bytes(serial.order, ONE, serial.pairs) == 104
    assert peak_bytes(beside.order, ONE, beside.pairs) == 107  # M_W of microbatch 0 and M_B of microbatch 1
    grows = CostTable.chain([replace(STAGE, weight_saved_bytes=5)])
    assert peak_bytes(beside.order, grows, beside.pairs) == 110  # M_W of both


def test_times_of_one_rank() -> None:
    schedule = run_beside(scheduled(ONE, "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1"))
    assert schedule.ranks == (tuple(actions("F0.0 B0.0 F0.1 W0.0 B0.1 W0.1")),)
    assert schedule.beside == ((parse("W0.0"), parse("B0.1")),)
    assert schedule.makespan_s == 20
    assert schedule.expected_s == 2 + 3 + 2 + 6 + 5
    assert schedule.peak_bytes == (107.0,)
    assert schedule.notes[-1] == "1 of 2 Ws run beside a B, on a second stream"


def test_times_over_two_ranks() -> None:
    """Rank 0's W0.0 has ended when B0.1 may start; rank 1's pair takes 6."""
    found = spans(TWO, "F0.0 F0.1 B0.0 W0.0+B0.1 W0.1", "F1.0 B1.0 F1.1 W1.0+B1.1 W1.1")
    assert found["F1.0"] == (9, 13)
    assert (found["B1.1"], found["W1.0"], found["W1.1"]) == ((20, 26), (20, 26), (26, 31))
    assert (found["B0.0"], found["W0.0"], found["B0.1"], found["W0.1"]) == ((23, 26), (26, 31), (33, 36), (36, 41))


def test_a_b_whose_input_comes_while_w_runs_shares_the_rest_of_it() -> None:
    """F1.0 6-10, F1.1 10-14, B1.0 14-17, B1.1 17-20; messages of 4, gradients of 6."""
    costs = CostTable.chain([STAGE, replace(STAGE, forward_s=4)], comm_s=4, backward_comm_s=6)
    found = spans(costs, "F0.0 F0.1 B0.0 W0.0+B0.1 W0.1", "F1.0 F1.1 B1.0 B1.1 W1.0 W1.1")
    assert (found["B0.0"], found["B0.1"], found["W0.0"]) == ((23, 26), (26, 32), (26, 32))
    slow = StageCost(2, 5, 5, beside_s=8)
    found = spans(
        CostTable.chain([STAGE, slow], comm_s=4), "F0.0 F0.1 B0.0 W0.0+B0.1 W0.1", "F1.0 F1.1 B1.0 B1.1 W1.0 W1.1"
    )
    # B1.0 10-15, B1.1 15-20: B0.0 19-22, W0.0 from 22, B0.1 from 24, when three fifths of W0.0 are left and add 9 / 5
    assert found["B0.0"] == (19, 22)
    assert found["B0.1"] == pytest.approx((24, 24 + 3 + 9 / 5))


def test_the_iteration_time_is_the_longest_rank_s_from_its_own_start() -> None:
    first, second, third = actions("F0.0 W1.0 B1.1")
    assert iteration_s([[Span(first, 0, 5)], [Span(second, 3, 8), Span(third, 4, 7)]]) == 5


def test_no_arrangement_breaks_the_limit() -> None:
    order = "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1"
    assert run_beside(scheduled(ONE, order, mem_limit=106)).beside == ()
    assert len(run_beside(scheduled(ONE, order, mem_limit=107)).beside) == 1


def test_a_pair_that_takes_as_long_as_its_actions_is_not_formed() -> None:
    slow = CostTable.chain([replace(STAGE, beside_s=8)])
    schedule = scheduled(slow, "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1")
    assert run_beside(schedule) is schedule


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "gpipe", "interleaved-1f1b"])
def test_expected_is_never_later_than_one_after_the_other(name: str) -> None:
    placement = (0, 1, 2, 0, 1, 2) if name == "interleaved-1f1b" else None
    stages = [replace(STAGE, forward_s=2 + k % 3) for k in range(6 if placement else 3)]
    costs = CostTable.chain(stages, comm_s=1, placement=placement)
    schedule = plan(costs, 9, schedule=name)
    beside = run_beside(schedule)
    assert beside.expected_s is not None
    assert beside.expected_s < schedule.iteration_s
    assert beside.spans == simulate(costs, 9, beside.ranks).spans
    for before, after in zip(schedule.ranks, beside.ranks, strict=True):
        unfused = [part for action in before for part in parts(action)]
        assert [a for a in unfused if a.kind is not Kind.W] == [a for a in after if a.kind is not Kind.W]
