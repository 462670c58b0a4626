"""The checker accepts what generators and the planner make and rejects every way of breaking it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbfx.errors import InvalidSchedule, NoFeasibleSchedule, ZbfxError
from zbfx.plan import Action, CostTable, Edge, Kind, StageCost
from zbfx.schedule import check
from zbfx.schedule.orders.handmade import zb_h1
from zbfx.schedule.orders.written import read_orders

COSTS = CostTable.chain([StageCost(2, 3, 5, saved_bytes=4, weight_saved_bytes=3, static_bytes=10)] * 2, 7)
GOOD = ("F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 BW1.0 F1.1 BW1.1")


def rejected(*orders: str, mem_limit: float | None = None) -> str:
    with pytest.raises(InvalidSchedule) as caught:
        check(COSTS, 2, read_orders(orders), mem_limit)
    return str(caught.value)


def test_a_good_schedule_passes() -> None:
    assert check(COSTS, 2, read_orders(GOOD), 18).peak_bytes == (18, 14)


def test_bs_and_ws_may_come_in_any_order() -> None:
    check(COSTS, 2, read_orders(["F0.0 F0.1 B0.1 B0.0 W0.0 W0.1", "F1.0 F1.1 B1.1 B1.0 W1.1 W1.0"]))


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("F0.0 F0.1 B0.0 B0.1 W0.1", "W0.0 is missing"),
        ("F0.0 F0.1 B0.0 W0.0 B0.1 W0.1 W0.1", "W0.1 runs a second time"),
        ("F0.0 F0.1 B0.0 W0.0 BW0.0 B0.1 W0.1", "BW0.0 runs a second time"),
        ("F0.0 F0.1 BW0.0 W0.0 BW0.1", "W0.0 runs a second time"),
        ("F0.0 F0.1 W0.0 B0.0 B0.1 W0.1", "W0.0 runs before B0.0"),
        ("B0.0 F0.0 F0.1 W0.0 B0.1 W0.1", "B0.0 runs before F0.0"),
        ("F0.1 F0.0 B0.0 W0.0 B0.1 W0.1", "F0.1 runs where F0.0 is due"),
        ("F0.0 F0.1 B0.0 W0.0 B0.1 F1.0 W0.1", "F1.0 belongs on rank 1"),
    ],
)
def test_broken_orders_are_named_and_marked(first: str, message: str) -> None:
    text = rejected(first, GOOD[1])
    assert message in text
    marked = re.search(r">(\w+\.\d+)<", text)
    assert marked is not None


def test_the_grid_marks_the_failing_cell() -> None:
    text = rejected("F0.0 F0.1 W0.0 B0.0 B0.1 W0.1", GOOD[1])
    assert text.splitlines()[0] == "rank 0, step 2: W0.0 runs before B0.0; the order is F, B, W"
    assert re.search(r"rank 0 +F0\.0 +F0\.1 +>W0\.0< +B0\.0", text)
    assert re.search(r"rank 1 +F1\.0 +BW1\.0 +F1\.1 +BW1\.1", text)


def test_memory_over_the_limit() -> None:
    text = rejected(*GOOD, mem_limit=17)
    assert "rank 0, step 1: F0.1 raises memory to 18, over the limit of 17; this order needs 18" in text


def test_a_limit_that_nothing_meets_names_the_smallest() -> None:
    with pytest.raises(NoFeasibleSchedule, match="smallest feasible limit is 14, set by stage 0") as caught:
        check(COSTS, 2, read_orders(GOOD), 13)
    assert caught.value.smallest_limit == 14


def test_actions_out_of_range() -> None:
    assert "stages 0 to 1 and microbatches 0 to 1" in rejected("F0.0 F0.1 F0.2", GOOD[1])
    assert "the placement has 2 ranks" in rejected(GOOD[0])


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ("F0.0 B0.0", "a schedule gives one order of actions per rank, in a list; found str"),
        ([3, 4], "an order is a list of actions, or text like 'F0.0 F0.1 B0.0'; found 3"),
        ([[3]], "an order is made of actions, or of text like 'F0.3'; found 3"),
        ([["F0"]], "an action reads like F0.3 (kind F, B, W or BW, stage, microbatch); found 'F0'"),
        ([[Action("F", 0, 0)]], "an order is made of actions, or of text like 'F0.3'; found Action(kind='F', "),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_order(orders: Any, message: str) -> None:
    with pytest.raises(ZbfxError) as caught:
        read_orders(orders)
    assert str(caught.value).startswith(message)


def test_orders_as_lists_of_text_and_of_actions_are_those_in_one_piece() -> None:
    assert read_orders([order.split() for order in GOOD]) == read_orders(GOOD)
    assert read_orders([[Action.parse("F0.0"), "F0.1 B0.0"], []]) == read_orders(["F0.0 F0.1 B0.0", ""])


def test_stages_and_microbatches_below_0() -> None:
    for action in (Action(Kind.F, -1, 0), Action(Kind.F, 0, -1)):
        with pytest.raises(InvalidSchedule, match=r"rank 0 runs F.*; there are stages 0 to 1 and microbatches 0 to 1"):
            check(COSTS, 2, [[action], []])


def test_costs_that_are_no_numbers() -> None:
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: StageCost("a", 1, 1), "a stage's forward_s is a finite number >= 0; found 'a'"),  # type: ignore[arg-type]
        (lambda: StageCost(1, 1, 1, backward_s=-1), "a stage's backward_s is a finite number >= 0, or None; found -1"),
        (
            lambda: StageCost(1, 1, 1, saved_bytes=10**101),
            f"a stage's saved_bytes is a finite number >= 0: 0, or from 1e-100 to 1e+100; found {10**101}. Choose "
            f"another unit",
        ),
        (
            lambda: Edge(0, 1, "b", 1),  # type: ignore[arg-type]
            "communication takes a finite number of seconds >= 0; found 'b' on edge 0 -> 1",
        ),
        (lambda: CostTable("ab", (), (0, 1)), "the stages of a cost table are StageCosts; found 'a'"),  # type: ignore[arg-type]
    ]
    for make, message in refused:
        with pytest.raises(ZbfxError) as caught:
            make()
        assert str(caught.value) == message


def test_ranks_that_send_and_receive_in_opposite_orders() -> None:
    """Two ranks, four stages in a V: each rank waits for what the other would do next."""
    costs = CostTable.chain([StageCost(1, 1, 1)] * 4, 1, placement=(0, 1, 1, 0))
    tail = "B0.0 W0.0 W3.0"
    orders = [f"F0.0 B3.0 F3.0 {tail}", "F1.0 F2.0 B2.0 B1.0 W2.0 W1.0"]
    with pytest.raises(InvalidSchedule, match=r"B3\.0 runs before F3\.0"):
        check(costs, 1, read_orders(orders))
    swapped = [
        "F0.0 F3.0 F0.1 F3.1 B3.0 B3.1 B0.0 B0.1 W0.0 W0.1 W3.0 W3.1",
        "F1.0 F1.1 F2.0 F2.1 B2.0 B1.0 B2.1 B1.1 W2.0 W1.0 W2.1 W1.1",
    ]
    with pytest.raises(
        InvalidSchedule, match=r"deadlock: rank 0 waits at F3.0 for F2.0, which rank 1 runs only after F1.1"
    ):
        check(costs, 2, read_orders(swapped))


def test_unreadable_limits() -> None:
    with pytest.raises(ZbfxError, match="a memory limit is a number of bytes"):
        check(COSTS, 2, read_orders(GOOD), "plenty")
    with pytest.raises(ZbfxError, match="one memory limit per rank: expected 2, found 3"):
        check(COSTS, 2, read_orders(GOOD), [20, 20, 20])


@st.composite
def mutations(draw: st.DrawFn) -> tuple[CostTable, int, list[list[Action]]]:
    """A valid schedule with one action dropped, doubled, or moved before what it needs."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    costs = CostTable.chain([StageCost(2, 3, 5)] * p, 7)
    ranks = [list(order) for order in zb_h1(costs, m)]
    order = ranks[draw(st.integers(0, p - 1))]
    index = draw(st.integers(0, len(order) - 1))
    action = order[index]
    what = draw(st.sampled_from(("drop", "double", "early") if action.kind is not Kind.F else ("drop", "double")))
    if what == "drop":
        del order[index]
    elif what == "double":
        order.insert(draw(st.integers(0, len(order))), action)
    else:
        needed = Action(Kind.F if action.kind is Kind.B else Kind.B, action.stage, action.microbatch)
        del order[index]
        order.insert(draw(st.integers(0, order.index(needed))), action)
    return costs, m, ranks


@given(mutations())
@settings(max_examples=150, deadline=None)
def test_every_mutation_is_rejected(mutated: tuple[CostTable, int, list[list[Action]]]) -> None:
    costs, m, ranks = mutated
    with pytest.raises(InvalidSchedule):
        check(costs, m, ranks)
