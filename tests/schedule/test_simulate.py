"""The simulator: times, memory and deadlocks of given orders. Unequal primes, so that no two mistakes cancel."""

import time

import pytest

from zbfx.errors import InvalidSchedule
from zbfx.plan import Action, CostTable, Edge, StageCost
from zbfx.schedule import simulate
from zbfx.schedule.orders.handmade import zb_h2
from zbfx.schedule.orders.written import read_orders

STAGE = StageCost(2, 3, 5, saved_bytes=4, weight_saved_bytes=3, static_bytes=10)


def times(costs: CostTable, microbatches: int, *orders: str) -> list[list[tuple[float, float]]]:
    timed = simulate(costs, microbatches, read_orders(orders))
    return [[(span.start_s, span.end_s) for span in spans] for spans in timed.spans]


def test_times_follow_data_order_and_communication() -> None:
    costs = CostTable.chain([STAGE, STAGE], 7)
    assert times(costs, 2, "F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 B1.0 F1.1 B1.1 W1.0 W1.1") == [
        [(0, 2), (2, 4), (21, 24), (24, 29), (29, 32), (32, 37)],
        [(9, 11), (11, 14), (14, 16), (16, 19), (19, 24), (24, 29)],
    ]


def test_the_gradient_leaves_after_a_fused_backward() -> None:
    costs = CostTable.chain([STAGE, STAGE], 7)
    assert times(costs, 1, "F0.0 BW0.0", "F1.0 BW1.0") == [[(0, 2), (26, 34)], [(9, 11), (11, 19)]]
    split = times(costs, 1, "F0.0 B0.0 W0.0", "F1.0 B1.0 W1.0")
    assert split == [[(0, 2), (21, 24), (24, 29)], [(9, 11), (11, 14), (14, 19)]]


def test_a_fused_backward_has_its_own_time() -> None:
    stage = StageCost(2, 3, 5, backward_s=6)
    assert times(CostTable.chain([stage]), 1, "F0.0 BW0.0") == [[(0, 2), (2, 8)]]


def test_each_edge_and_direction_has_its_own_time() -> None:
    costs = CostTable.chain([STAGE] * 3, [7, 11], backward_comm_s=[13, 17])
    assert times(costs, 1, "F0.0 B0.0 W0.0", "F1.0 B1.0 W1.0", "F2.0 B2.0 W2.0") == [
        [(0, 2), (60, 63), (63, 68)],
        [(9, 11), (44, 47), (47, 52)],
        [(22, 24), (24, 27), (27, 32)],
    ]


def test_stages_of_one_rank_exchange_values_at_no_cost() -> None:
    costs = CostTable.chain([STAGE] * 4, 7, placement=(0, 1, 1, 0))
    (first, _) = times(costs, 1, "F0.0 F3.0 B3.0 W3.0 B0.0 W0.0", "F1.0 F2.0 B2.0 B1.0 W2.0 W1.0")
    assert first[:3] == [(0, 2), (20, 22), (22, 25)]
    assert first[4] == (45, 48)


def test_skip_edges_and_missing_directions() -> None:
    edges = (Edge(0, 1, 1, None), Edge(1, 2, 1, 1), Edge(0, 2, 100, 50))
    costs = CostTable((STAGE,) * 3, edges, (0, 1, 2))
    one, two, three = times(costs, 1, "F0.0 B0.0 W0.0", "F1.0 B1.0 W1.0", "F2.0 B2.0 W2.0")
    assert three[0] == (102, 104)
    assert two[1] == (108, 111)
    assert one[1] == (157, 160)


def test_memory_over_time_and_its_peak() -> None:
    timed = simulate(CostTable.chain([STAGE]), 2, read_orders(["F0.0 F0.1 B0.0 W0.0 B0.1 W0.1"]))
    assert timed.memory == (((0.0, 10), (0, 14), (2, 18), (7, 17), (12, 14), (15, 13), (20, 10)),)
    assert timed.peak_bytes == (18,)


def test_memory_that_a_b_adds_counts_from_its_start() -> None:
    stage = StageCost(2, 3, 5, saved_bytes=4, weight_saved_bytes=6)
    timed = simulate(CostTable.chain([stage]), 1, read_orders(["F0.0 B0.0 W0.0"]))
    assert timed.memory == (((0.0, 0), (0, 4), (2, 6), (10, 0)),)
    assert timed.peak_bytes == (6,)


def test_decimal_times_are_exact() -> None:
    timed = simulate(CostTable.chain([StageCost(0.1, 0.2, 0.3)]), 10, [[*F_THEN_BW]])
    assert timed.iteration_s == 6.0


F_THEN_BW = [Action.parse(f"F0.{j}") for j in range(10)] + [Action.parse(f"BW0.{j}") for j in range(10)]


def test_a_cycle_between_ranks_is_named() -> None:
    costs = CostTable.chain([STAGE, STAGE], 7)
    with pytest.raises(InvalidSchedule) as caught:
        simulate(costs, 2, read_orders(["F0.0 B0.0 F0.1 B0.1 W0.0 W0.1", "F1.0 F1.1 B1.0 B1.1 W1.0 W1.1"]))
    text = str(caught.value)
    assert "rank 0 waits at B0.0 for B1.0, which rank 1 runs only after F1.1" in text
    assert "rank 1 waits at F1.1 for F0.1, which rank 0 runs only after B0.0" in text
    assert ">B0.0<" in text
    assert ">F1.1<" in text


def test_an_action_that_nobody_runs_is_named() -> None:
    costs = CostTable.chain([STAGE, STAGE], 7)
    with pytest.raises(InvalidSchedule, match=r"rank 1 waits at F1\.0 for F0\.0, which no rank runs"):
        simulate(costs, 1, read_orders(["", "F1.0 B1.0 W1.0"]))


def test_32_stages_by_256_microbatches_take_less_than_a_tenth_of_a_second() -> None:
    costs = CostTable.chain([StageCost(10.4, 10.2, 7.7)] * 32, 0.4)
    ranks = zb_h2(costs, 256)
    assert sum(map(len, ranks)) == 32 * 256 * 3
    seconds = []
    for _ in range(5):
        begun = time.process_time()
        simulate(costs, 256, ranks)
        seconds.append(time.process_time() - begun)
    assert min(seconds) < 0.1
