"""Ws beside Bs: which pairs a rank forms, what they hold, and when the actions then run; by hand."""

from __future__ import annotations

from dataclasses import replace

from zbfx.plan import Action, CostTable, Kind, Schedule, StageCost
from zbfx.schedule import plan
from zbfx.schedule.beside import expected, pairs_of, peak_bytes, run_beside

# F=2, B=3, W=5, B with a W beside it 6: a pair takes 6 where its actions take 8.
STAGE = StageCost(2, 3, 5, saved_bytes=4, weight_saved_bytes=3, static_bytes=100, beside_s=6)
ONE = CostTable.chain([STAGE])
TWO = CostTable.chain([STAGE, replace(STAGE, forward_s=4)], comm_s=7)


parse = Action.parse


def actions(text: str) -> list[Action]:
    return list(map(Action.parse, text.split()))


def scheduled(costs: CostTable, *ranks: str, mem_limit: float | None = None) -> Schedule:
    microbatches = ranks[0].count("F")
    return plan(costs, microbatches, schedule=ranks, mem_limit=mem_limit)


def test_a_w_runs_beside_the_b_that_follows_within_reach() -> None:
    order = actions("F0.0 B0.0 W0.0 F0.1 B0.1 F0.2 W0.1 F0.3 F0.4 B0.2 W0.2")
    assert pairs_of(order, ONE, None, None) == {Action(Kind.W, 0, 0): Action(Kind.B, 0, 1)}  # the B of W0.1 is too far


def test_ws_of_a_stage_keep_their_order() -> None:
    order = actions("F0.0 F0.1 F0.2 B0.0 B0.1 W0.0 W0.1 B0.2 W0.2")
    assert pairs_of(order, ONE, None, None) == {Action(Kind.W, 0, 1): Action(Kind.B, 0, 2)}


def test_a_b_takes_one_w() -> None:
    order = actions("F0.0 F1.0 F0.1 B1.0 B0.0 W1.0 W0.0 B0.1")
    assert pairs_of(order, CostTable.chain([STAGE, STAGE], placement=[0, 0]), None, None) == {
        parse("W1.0"): parse("B0.1")
    }


def test_stages_that_may_not_are_left_alone() -> None:
    order = actions("F0.0 B0.0 W0.0 F0.1 B0.1 W0.1")
    assert pairs_of(order, ONE, None, frozenset({1})) == {}


def test_what_a_w_reads_is_held_until_its_b_has_ended() -> None:
    order = actions("F0.0 B0.0 W0.0 F0.1 B0.1 W0.1")
    assert peak_bytes(order, ONE, {}) == 104
    pairs = pairs_of(order, ONE, None, None)
    assert peak_bytes(order, ONE, pairs) == 107  # M_W of microbatch 0 and M_B of microbatch 1


def test_no_pair_breaks_the_limit() -> None:
    order = actions("F0.0 B0.0 W0.0 F0.1 B0.1 W0.1")
    assert pairs_of(order, ONE, 106.9, None) == {}
    assert len(pairs_of(order, ONE, 107, None)) == 1


def test_times_of_one_rank() -> None:
    schedule = run_beside(scheduled(ONE, "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1"))
    assert schedule.beside == ((Action(Kind.W, 0, 0), Action(Kind.B, 0, 1)),)
    assert schedule.makespan_s == 20
    assert schedule.expected_s == 2 + 3 + 2 + 6 + 5
    assert schedule.peak_bytes == (107.0,)


def test_times_over_two_ranks() -> None:
    """Rank 1: F 9-13, B 13-16, F 16-20, B beside W 20-26, W 26-31. Rank 0: B 23-26, W 26-31, alone before B 33-36."""
    schedule = run_beside(scheduled(TWO, "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 B1.0 W1.0 F1.1 B1.1 W1.1"))
    pairs = dict(schedule.beside)
    assert pairs == {parse("W0.0"): parse("B0.1"), parse("W1.0"): parse("B1.1")}
    assert schedule.makespan_s == 43
    assert schedule.expected_s == 41
    spans = {str(s.action): (s.start_s, s.end_s) for rank in expected(TWO, schedule.ranks, pairs) for s in rank}
    assert (spans["B1.1"], spans["W1.0"]) == ((20, 26), (20, 26))
    assert (spans["W0.0"], spans["B0.1"], spans["W0.1"]) == ((26, 31), (33, 36), (36, 41))


def test_a_b_whose_input_arrives_while_w_runs_shares_the_rest() -> None:
    """As above with messages of 4: B0.1 starts 2 after W0.0 did; three fifths of it are left, and add 3 * 3 / 5."""
    costs = CostTable.chain([STAGE, replace(STAGE, forward_s=4)], comm_s=4)
    ranks = ["F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 F1.1 B1.0 B1.1 W1.0 W1.1"]
    schedule = scheduled(costs, *ranks)
    pairs = {parse("W0.0"): parse("B0.1")}
    spans = {str(s.action): (s.start_s, s.end_s) for rank in expected(costs, schedule.ranks, pairs) for s in rank}
    assert spans["B0.0"] == (21, 24)  # F1.0 6-10, F1.1 10-14, B1.0 14-17, B1.1 17-20
    assert spans["W0.0"] == (24, 30)
    assert spans["B0.1"] == (24, 30)
    late = replace(costs, edges=(replace(costs.edges[0], forward_s=4, backward_s=6),))
    spans = {str(s.action): (s.start_s, s.end_s) for rank in expected(late, schedule.ranks, pairs) for s in rank}
    assert spans["B0.0"] == (23, 26)
    assert spans["B0.1"] == (26, 32)


def test_a_w_that_fills_a_wait_stays_where_it_is() -> None:
    """Rank 0 waits for B1.1 while W0.0 runs; put off until after F0.2, it would delay what follows."""
    ranks = ["F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 W1.0 W1.1 W1.2"]
    serial = scheduled(replace(TWO, stages=(replace(STAGE, beside_s=8), TWO.stages[1])), *ranks)
    assert (run_beside(serial).expected_s or 0) <= serial.makespan_s
