"""The planner: what it must reach on the paper's settings, limits, choices, determinism."""

from __future__ import annotations

import pytest

from benchmarks.planner.paper_settings import Setting, settings
from benchmarks.planner.random_instances import best_handmade, random_cases
from zbfx.errors import NoFeasibleSchedule, ZbfxError
from zbfx.plan import CostTable, Edge, Kind, StageCost
from zbfx.schedule import check, plan
from zbfx.schedule.orders.vshape import v_placement

SETTINGS = {(setting.model, setting.microbatches): setting for setting in settings()}
BEST = {  # bubble rates that meet their lower bound: (ZB-1p, ZB-2p)
    ("1.5B", 24): (0.15852, 0.04331),
    ("1.5B", 32): (0.12419, 0.00168),
    ("1.5B", 64): (0.06740, 0.00110),
    ("6.2B", 24): (0.13230, 0.00123),
    ("6.2B", 32): (0.10448, 0.00093),
    ("6.2B", 64): (0.05537, 0.00045),
    ("14.6B", 48): (0.13973, 0.00310),
    ("14.6B", 64): (0.10883, 0.00251),
    ("14.6B", 128): (0.05761, 0.00131),
    ("28.3B", 96): (0.14215, 0.00332),
    ("28.3B", 128): (0.11062, 0.00253),
    ("28.3B", 256): (0.05943, 0.00184),
}


@pytest.mark.slow
@pytest.mark.parametrize("key", BEST, ids=lambda key: f"{key[0]}-m{key[1]}")
def test_zb_1p_and_zb_2p_are_proven_optimal(key: tuple[str, int]) -> None:
    setting = SETTINGS[key]
    for name, rate in zip(("zb-1p", "zb-2p"), BEST[key], strict=True):
        found = plan(setting.linear(), setting.microbatches, schedule=name)
        assert round(found.bubble_rate, 5) == rate
        assert found.gap == 0
        assert found.lower_bound_s == found.iteration_s


@pytest.mark.parametrize(
    ("key", "limit", "rate"),
    [
        (("1.5B", 32), "1.125x", 0.0995),
        (("1.5B", 32), "1.25x", 0.0735),
        (("6.2B", 32), "1.5x", 0.0363),
        (("6.2B", 32), "2.5x", 0.0003),
        (("14.6B", 48), "1.75x", 0.0289),
    ],
)
def test_limits_between_1p_and_2p(key: tuple[str, int], limit: str, rate: float) -> None:
    setting = SETTINGS[key]
    found = plan(setting.linear(), setting.microbatches, mem_limit=limit, budget_s=10)
    assert round(found.bubble_rate, 4) <= rate
    assert found.gap == 0


def test_the_v_placement_needs_less_memory() -> None:
    setting = SETTINGS["14.6B", 48]
    found = plan(setting.v_shaped(), setting.microbatches, mem_limit="1.5x", budget_s=20)
    assert found.bubble_rate == 0
    assert found.gap == 0


@pytest.mark.slow
def test_auto_chooses_the_placement() -> None:
    setting: Setting = SETTINGS["6.2B", 24]
    found = plan([setting.linear(), setting.v_shaped()], 24, mem_limit="1x", budget_s=4)
    assert found.costs.placement == v_placement(8)
    assert any(note.startswith("placement 0 1 2 3 4 5 6 7:") for note in found.notes)
    assert any(note.startswith("zb-v-order:") for note in found.notes)


@pytest.mark.solver
def test_unequal_stages() -> None:
    """Never worse than a handmade schedule that fits; nearly always proven optimal."""
    gaps = []
    for case in random_cases(seed=2, count=10):
        found = plan(case.costs, case.microbatches, mem_limit=case.mem_limit, budget_s=2)
        check(case.costs, case.microbatches, found.ranks, case.mem_limit)
        assert found.iteration_s <= best_handmade(case)
        gaps.append(found.gap)
    assert sum(gap == 0 for gap in gaps) >= 6
    assert sum(gaps) / len(gaps) < 0.01


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (4, 1), (4, 2), (3, 7)])
@pytest.mark.parametrize("limit", ["1x", "2x", None])
def test_any_number_of_ranks_and_microbatches(p: int, m: int, limit: str | None) -> None:
    costs = CostTable.chain([StageCost(2, 3, 5, 4, 3)] * p, 7)
    assert plan(costs, m, mem_limit=limit, budget_s=1).gap < 0.05


def test_orders_as_text_and_as_a_schedule_give_the_same() -> None:
    costs = CostTable.chain([StageCost(2, 3, 5)] * 2, 7)
    one = plan(costs, 2, schedule=["F0.0 F0.1 B0.0 W0.0 B0.1 W0.1", "F1.0 BW1.0 F1.1 BW1.1"])
    again = plan(costs, 2, schedule=one)
    assert (one.ranks, one.spans, one.lower_bound_s) == (again.ranks, again.spans, again.lower_bound_s)


def test_a_seed_fixes_the_plan() -> None:
    costs = CostTable.chain([StageCost(3 + i % 2, 2 + i % 3, 4, 3, 2) for i in range(4)], 1)
    first, second = (plan(costs, 9, mem_limit="1.25x", budget_s=20, seed=3) for _ in range(2))
    assert first.ranks == second.ranks


def test_frozen_stages() -> None:
    """Stages without a backward: no gradient reaches them, and nothing waits for their B and W."""
    frozen, trained = StageCost(1, 0, 0, 1, 0), StageCost(1, 1, 1, 1, 0.5)
    edges = (Edge(0, 1, 0.5, None), Edge(1, 2, 0.5, None), Edge(2, 3, 0.5, 0.5))
    costs = CostTable((frozen, frozen, trained, trained), edges, (0, 1, 2, 3))
    found = plan(costs, 6, mem_limit="1x", budget_s=2)
    assert found.iteration_s < 6 * 3 + 3
    assert all(action.kind in (Kind.F, Kind.BW) for order in found.ranks[:2] for action in order)


def test_backwards_stay_whole_where_splitting_does_not_pay() -> None:
    costs = CostTable.chain([StageCost(1, 2, 1, 1, 0.5, backward_s=2)] * 4, 0.05)
    found = plan(costs, 12, budget_s=3)
    assert all(action.kind in (Kind.F, Kind.BW) for order in found.ranks for action in order)
    assert any("not split" in note for note in found.notes)


@pytest.mark.parametrize("weight_saved", [0, 2, 6])
def test_every_feasible_limit_has_a_schedule(weight_saved: int) -> None:
    costs = CostTable.chain([StageCost(2, 3, 5, 4, weight_saved, static_bytes=1 + i) for i in range(3)], 1)
    for limit in (7, 8, 9.5, 12):
        found = plan(costs, 5, mem_limit=limit, budget_s=1)
        assert max(found.peak_bytes) <= limit
    for limit in (6.5, 3.5):  # not M_B of stage 2; no M_B at all
        for name in ("auto", "zb-h1", "gpipe"):
            with pytest.raises(NoFeasibleSchedule, match="smallest feasible limit is 7, set by stage 2") as caught:
                plan(costs, 5, schedule=name, mem_limit=limit)
            assert caught.value.smallest_limit == 7


def test_static_bytes_have_one_figure() -> None:
    stage = StageCost(2, 3, 5, 4, 3, static_bytes=20, transient_bytes=6)
    with pytest.raises(NoFeasibleSchedule) as caught:
        plan(CostTable.chain([stage] * 2, 1), 4, mem_limit="0.25x")
    assert str(caught.value).startswith(
        "no schedule fits in 28 on rank 0: it holds 26 throughout (20 static, and room for 6 inside an action), and 4 "
        "for a single microbatch. The smallest feasible limit is 30, set by stage 0 (M_B 4). Raise the limit"
    )


def test_one_limit_per_rank() -> None:
    costs = CostTable.chain([StageCost(2, 3, 5, 4, 3)] * 3, 1)
    found = plan(costs, 8, mem_limit=[8, 20, 12], budget_s=1)
    assert all(peak <= limit for peak, limit in zip(found.peak_bytes, (8, 20, 12), strict=True))


@pytest.mark.parametrize(
    ("text", "limit"), [("40", 40), ("40B", 40), ("40 b", 40), ("0.04kB", 40), ("1 KiB", 1024), ("0.5MiB", 2**19)]
)
def test_limits_with_units(text: str, limit: int) -> None:
    costs = CostTable.chain([StageCost(2, 3, 5, 4, 3)] * 3, 1)
    assert plan(costs, 4, schedule="1f1b", mem_limit=text).mem_limit == (limit,) * 3


def test_no_time_still_gives_a_schedule() -> None:
    costs = CostTable.chain([StageCost(2, 3, 5, 4, 3)] * 3, 1)
    assert plan(costs, 8, mem_limit=4, budget_s=1e-9).iteration_s > 0


def test_unknown_names_and_bad_requests() -> None:
    costs = CostTable.chain([StageCost(2, 3, 5)] * 2, 1)
    with pytest.raises(ZbfxError, match="no schedule is called 'zb-3p'; did you mean 'zb-2p'\\? Known: gpipe, "):
        plan(costs, 2, schedule="zb-3p")
    with pytest.raises(ZbfxError, match="at least one microbatch; found 0"):
        plan(costs, 0)
    with pytest.raises(ZbfxError, match="empty sequence"):
        plan([], 2)
