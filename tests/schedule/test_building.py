"""What generators are made of: values by hand, and every order checked by the one checker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest

from zbfx import CostTable, Kind, NoFeasibleSchedule, StageCost, ZbfxError
from zbfx.schedule import (
    LOOPED,
    V,
    check,
    improve,
    list_schedule,
    names,
    place_ws,
    plan,
    register,
    repeat_block,
    squeeze,
)
from zbfx.schedule.orders.handmade import Orders, gpipe, zb_h2
from zbfx.schedule.orders.registry import GENERATORS, SHAPES
from zbfx.schedule.orders.vshape import v_half, v_min
from zbfx.schedule.orders.written import read_orders

UNLIKE = StageCost(2, 3, 5, 4, 3)
LINEAR_2 = CostTable.chain([UNLIKE] * 2, 7)


def chain(p: int, v: bool, random: Random) -> CostTable:
    stages = [
        StageCost(random.randint(1, 9), random.randint(1, 9), random.randint(1, 9), random.randint(3, 5), 2)
        for _ in range(2 * p if v else p)
    ]
    return CostTable.chain(stages, random.randint(0, 3), V.placement(p, 2) if v else None)


def test_a_block_repeats() -> None:
    block = {"F0.0": 0, "F1.0": 1, "B1.0": 2, "B0.0": 3, "W1.0": 4, "W0.0": 5}
    assert repeat_block(LINEAR_2, 2, block, every=3) == read_orders(
        ["F0.0 B0.0 F0.1 W0.0 B0.1 W0.1", "F1.0 B1.0 F1.1 W1.0 B1.1 W1.1"]
    )
    for missing, text in (("W1.0", "of stage 1 it has B, F"), ("F0.0", "of stage 0 it has B, W")):
        with pytest.raises(ZbfxError, match=text):
            repeat_block(LINEAR_2, 2, {a: t for a, t in block.items() if a != missing}, every=3)
    with pytest.raises(ZbfxError, match=r"actions of microbatch 0 of 2 stages; found F0\.1"):
        repeat_block(LINEAR_2, 2, block | {"F0.1": 3}, every=3)


def test_lists_by_rules() -> None:
    """By hand, F=2, B=3, W=5, comm=7: rank 0 holds both Fs; W0.0 would take 5 of the 6 until B0.1 arrives."""
    assert list_schedule(LINEAR_2, 2) == read_orders(["F0.0 F0.1 B0.0 B0.1 W0.0 W0.1", "F1.0 B1.0 F1.1 B1.1 W1.0 W1.1"])
    impatient = list_schedule(LINEAR_2, 2, patience=0)
    assert impatient[1] == read_orders(["F1.0 B1.0 F1.1 B1.1 W1.0 W1.1"])[0]
    assert list_schedule(LINEAR_2, 2, hold=(2, 2))[1] == read_orders(["F1.0 F1.1 B1.0 B1.1 W1.0 W1.1"])[0]
    one_by_one = list_schedule(LINEAR_2, 2, cap=1)
    assert one_by_one[0][:2] == read_orders(["F0.0 B0.0"])[0]
    with pytest.raises(ZbfxError, match="hold is a number, or one per stage: expected 2, found 3"):
        list_schedule(LINEAR_2, 2, hold=(1, 1, 1))
    with pytest.raises(NoFeasibleSchedule):
        list_schedule(LINEAR_2, 2, 3)


@pytest.mark.parametrize("seed", range(12))
def test_every_order_keeps_the_rules_and_the_limit(seed: int) -> None:
    random = Random(seed)
    p, v, m = random.randint(1, 5), random.random() < 0.5, random.randint(1, 9)
    costs = chain(p, v, random)
    start = v_half(costs, m) if v else zb_h2(costs, m)
    for limits in (None, "2x", "1x"):
        for orders in (
            list_schedule(costs, m, limits),
            list_schedule(costs, m, limits, patience=0.5, alternate=True, recycle=True),
        ):
            check(costs, m, orders, limits)
    peak = max(check(costs, m, start).peak_bytes)
    squeezed, replaced = squeeze(costs, m, start, peak), place_ws(costs, m, start, peak, patience=0.5)
    assert check(costs, m, squeezed, peak).iteration_s <= check(costs, m, start, peak).iteration_s
    check(costs, m, replaced, peak)
    without = [[[a for a in order if a.kind is not Kind.W] for order in orders] for orders in (start, replaced)]
    assert without[0] == without[1]


@pytest.mark.parametrize(("p", "generate"), list(product((4, 5, 9), (v_half, v_min))))
def test_squeeze_closes_the_gaps_of_repeated_blocks(p: int, generate: Any) -> None:
    """Where memory leaves room: these blocks hold a half and a third of 1x."""
    costs, m = CostTable.chain([StageCost(1, 1, 1, 2, 1)] * (2 * p), 0, V.placement(p, 2)), 2 * p
    orders = generate(costs, m)
    before, after = check(costs, m, orders), check(costs, m, squeeze(costs, m, orders, "1x"), "1x")
    assert after.iteration_s < before.iteration_s


def test_squeeze_says_where_no_order_fits() -> None:
    costs = CostTable.chain([UNLIKE] * 2, 7)
    with pytest.raises(ZbfxError, match="does not fit the memory limit, and no action can be moved"):
        squeeze(costs, 3, gpipe(costs, 3), 4)


def test_generators_get_the_limit() -> None:
    given: list[Sequence[float] | None] = []

    def with_limits(costs: CostTable, microbatches: int, limits: Sequence[float] | None) -> Orders:
        given.append(limits)
        return list_schedule(costs, microbatches, limits)

    def with_an_extra(costs: CostTable, microbatches: int, extra: int = 1) -> Orders:
        assert extra == 1
        return gpipe(costs, microbatches)

    assert plan(LINEAR_2, 3, schedule=with_limits).name == "with_limits"
    assert max(plan(LINEAR_2, 3, schedule=with_limits, mem_limit=[9, 8]).peak_bytes) <= 9
    plan(LINEAR_2, 3, schedule=with_limits, mem_limit="1x")
    plan(LINEAR_2, 3, schedule=improve(with_limits), mem_limit="1x", budget_s=0.1)
    assert given == [None, (9, 8), (8, 8), (8, 8)]
    plan(LINEAR_2, 3, schedule=with_an_extra)


def test_a_registered_schedule_has_a_placement() -> None:
    register("twice", LOOPED)(lambda costs, microbatches: gpipe(costs, microbatches))
    try:
        assert "twice" in names()
        assert SHAPES["twice"].placement(3, SHAPES["twice"].default) == (0, 1, 2, 0, 1, 2)
    finally:
        del GENERATORS["twice"], SHAPES["twice"]
