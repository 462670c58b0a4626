"""Generated schedules: the paper's bubble rates to its four digits, memory, and every shape of problem."""

from __future__ import annotations

from itertools import product

import pytest

from benchmarks.planner.paper_settings import Setting, settings
from benchmarks.planner.paper_tables import closed_form
from zbfx.errors import ZbfxError
from zbfx.plan import CostTable, Kind, StageCost
from zbfx.schedule import check, names, plan, register
from zbfx.schedule.orders.handmade import Orders, gpipe, interleaved_1f1b, looped_placement
from zbfx.schedule.orders.registry import GENERATORS
from zbfx.schedule.orders.vshape import v_half, v_min, v_placement, zb_v

UNEQUAL = [StageCost(2, 3, 5, 4, 3), StageCost(3, 2, 1, 5, 2), StageCost(1, 7, 2, 3, 3), StageCost(5, 1, 3, 2, 1)]
SETTINGS = settings()


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_bubble_rates_of_the_paper(setting: Setting, name: str) -> None:
    timed = plan(setting.linear(), setting.microbatches, schedule=name)
    assert round(timed.bubble_rate, 4) == setting.paper_rates[name]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_interleaved_1f1b(setting: Setting) -> None:
    assert round(closed_form(setting).bubble_rate, 4) == setting.paper_rates["1f1b-i"]
    timed = plan(setting.interleaved(), setting.microbatches, schedule="interleaved-1f1b")
    assert abs(timed.bubble_rate - setting.paper_rates["1f1b-i"]) < 0.004


def test_peak_memory_of_handmade_schedules() -> None:
    """Table 2 of the paper: p M_B for 1F1B and ZB-H1, (2p - 1) M_B for ZB-H2, m M_B for GPipe."""
    costs = CostTable.chain([StageCost(1, 1, 1, saved_bytes=8, weight_saved_bytes=4)] * 4, 0)
    peaks = {name: max(plan(costs, 12, schedule=name).peak_bytes) / 8 for name in ("gpipe", "1f1b", "zb-h1", "zb-h2")}
    assert peaks == {"gpipe": 12, "1f1b": 4, "zb-h1": 4, "zb-h2": 7}


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (4, 1), (4, 2), (4, 4), (4, 9)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_any_number_of_ranks_and_microbatches(p: int, m: int, name: str) -> None:
    costs = CostTable.chain(UNEQUAL[:p], 0.5)
    check(costs, m, GENERATORS[name](costs, m))


@pytest.mark.parametrize(("p", "stages_per_rank", "m"), list(product((1, 2, 3, 5), (2, 3), (1, 3, 7, 12))))
def test_interleaved_runs_for_any_number_of_microbatches(p: int, stages_per_rank: int, m: int) -> None:
    stages = [StageCost(2, 3, 5)] * (p * stages_per_rank)
    costs = CostTable.chain(stages, 0.5, looped_placement(p, stages_per_rank))
    check(costs, m, interleaved_1f1b(costs, m))


@pytest.mark.parametrize(("p", "m"), list(product((1, 2, 3, 6), (1, 3, 7, 20))))
def test_v_schedules_run_for_any_number_of_microbatches(p: int, m: int) -> None:
    costs = CostTable.chain([StageCost(2, 3, 5)] * (2 * p), 0.5, v_placement(p))
    for generate in (zb_v, v_half, v_min, gpipe):
        check(costs, m, generate(costs, m))


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 24)])
def test_zb_v_has_no_bubble_at_equal_times_and_1f1b_memory(p: int, m: int) -> None:
    costs = CostTable.chain([StageCost(1, 1, 1, 1, 0.5)] * (2 * p), 0, v_placement(p))
    timed = plan(costs, m, schedule="zb-v")
    assert timed.bubble_rate == 0
    assert timed.gap == 0
    assert max(timed.peak_bytes) <= 2 * p


@pytest.mark.parametrize(
    ("name", "p", "m", "rate", "pairs"),
    [
        ("v-half", 16, 48, 0.1246, 9),
        ("v-min", 9, 27, 0.1518, 4),
        ("v-min", 16, 48, 0.17, 6),
        ("v-half", 8, 24, 0.1056, 5),
    ],
)
def test_warm_up_and_cool_down_are_closed_up(name: str, p: int, m: int, rate: float, pairs: int) -> None:
    """Bubble rates of the authors' own generator, in the memory of as many pairs of M_B."""
    costs = CostTable.chain([StageCost(1, 1, 1, 1, 1)] * (2 * p), 0, v_placement(p))
    found = plan(costs, m, schedule=name)
    assert max(found.peak_bytes) <= 2 * pairs
    assert round(found.bubble_rate, 4) <= rate


@pytest.mark.parametrize("p", [4, 5, 6, 8, 9, 12])
def test_v_half_and_v_min_trade_memory_for_bubbles(p: int) -> None:
    """About half the memory and half the bubbles of 1F1B; about a third of the memory and two thirds of the bubbles."""
    m = 3 * p
    whole = CostTable.chain([StageCost(2, 2, 2, 2, 1)] * p, 0)
    costs = CostTable.chain([StageCost(1, 1, 1, 1, 0.5)] * (2 * p), 0, v_placement(p))
    one = plan(whole, m, schedule="1f1b")
    half, least = plan(costs, m, schedule="v-half"), plan(costs, m, schedule="v-min")
    bubble = one.iteration_s - 6 * m
    assert max(one.peak_bytes) == 2 * p
    assert max(half.peak_bytes) <= p + 2
    assert (half.iteration_s - 6 * m) / bubble < 0.6
    assert 3 * max(least.peak_bytes) <= 2 * p + 8
    assert (least.iteration_s - 6 * m) / bubble < 0.75


def test_wrong_placements_are_refused() -> None:
    linear = CostTable.chain(UNEQUAL, 0)
    looped = CostTable.chain(UNEQUAL, 0, (0, 1, 0, 1))
    for name in ("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"):
        with pytest.raises(ZbfxError, match=rf"{name} puts stage i on rank i"):
            plan(looped, 4, schedule=name)
    for name in ("zb-v", "v-half", "v-min"):
        with pytest.raises(ZbfxError, match=r"in a V: expected placement \(0, 1, 1, 0\)") as caught:
            plan(linear, 4, schedule=name)
        assert "Set the field placement of the cost table to [0, 1, 1, 0]" in str(caught.value)
        with pytest.raises(ZbfxError, match="an even number of stages, found 3"):
            plan(CostTable.chain(UNEQUAL[:3], 0), 4, schedule=name)
    with pytest.raises(ZbfxError, match=r"two or more: found placement \(0, 1, 2, 3\)") as caught:
        plan(linear, 4, schedule="interleaved-1f1b")
    assert "for two ranks [0, 1, 0, 1]" in str(caught.value)
    with pytest.raises(ZbfxError, match="stage i on rank i mod p"):
        plan(CostTable.chain(UNEQUAL, 0, (0, 1, 1, 0)), 4, schedule="interleaved-1f1b")


def test_a_users_generator_through_the_registry() -> None:
    @register("all-forwards")
    def all_forwards(costs: CostTable, microbatches: int) -> Orders:
        return gpipe(costs, microbatches)

    try:
        assert "all-forwards" in names()
        found = plan(CostTable.chain(UNEQUAL, 0), 3, schedule="all-forwards")
        assert found.name == "all-forwards"
        assert all(action.kind in (Kind.F, Kind.BW) for order in found.ranks for action in order)
    finally:
        del GENERATORS["all-forwards"]
    with pytest.raises(ZbfxError, match="searched schedule"):
        register("auto")(gpipe)
