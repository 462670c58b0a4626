"""Annealing over whole orders, and backwards fused or split one by one."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.schedule.exhaustive import best_cost
from zbfx.plan import CostTable, Edge, Kind, StageCost
from zbfx.schedule import check, plan
from zbfx.schedule.search.annealing import Annealing
from zbfx.schedule.search.fusing import evaluated
from zbfx.schedule.search.list_scheduling import Listed
from zbfx.schedule.search.order_search import OrderSearch
from zbfx.timing.exact import Instance, instance
from zbfx.timing.limits import limit_per_rank

UNEQUAL = [StageCost(2, 3, 5, 4, 3), StageCost(3, 1, 2, 3, 2), StageCost(1, 2, 1, 4, 1), StageCost(2, 2, 3, 3, 3)]
# A fused backward takes 200, B and W apart 240.
CHEAP_WHEN_FUSED = CostTable.chain([StageCost(100, 120, 120, 1, 0.5, backward_s=200)] * 4, 0)


def one_by_one(costs: CostTable, microbatches: int) -> tuple[Instance, Listed]:
    search = OrderSearch(costs, microbatches, None, 0, 0.0)
    listed = evaluated(search.problem, search.one_by_one(), None)
    assert listed is not None
    return search.problem, listed


@pytest.mark.parametrize("placement", [(0, 1, 1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("limit", [None, 11])
def test_annealing_finds_the_exhaustive_optimum(placement: tuple[int, ...], limit: int | None) -> None:
    pytest.importorskip("numba")
    costs = CostTable.chain(UNEQUAL, 7, placement)
    problem, start = one_by_one(costs, 1)
    found = Annealing(problem, problem.units(limit_per_rank(costs, limit)), 0).improve(start, 0, 1e18, 20_000)
    assert found.cost == best_cost(costs, 1, limit)


def test_annealing_keeps_the_limit_and_its_seed_fixes_the_way() -> None:
    pytest.importorskip("numba")
    costs = CostTable.chain(UNEQUAL, 7, (0, 1, 0, 1))
    problem, start = one_by_one(costs, 6)
    units = problem.units(limit_per_rank(costs, 15))
    first, second = (Annealing(problem, units, 3).improve(start, 0, 1e18, 40_000) for _ in range(2))
    assert first == second
    assert first.cost < start.cost
    timed = check(costs, 6, problem.decode(first.orders), 15)
    assert timed.iteration_ticks == first.cost


def test_annealing_times_what_it_changes_as_the_simulator_does() -> None:
    """`improve` compares the costs of what it finds. Skips, actions that take no time, backwards cheaper when fused."""
    pytest.importorskip("numba")
    random = Random(0)
    for _ in range(12):
        placement = random.choice([(0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2, 3)])
        times = [[random.choice((0, 1, 5, 7)) for _ in range(3)] for _ in placement]
        stages = [StageCost(1 + f, b, w, 3, 1, backward_s=random.choice((None, b + w / 2))) for f, b, w in times]
        chain = CostTable.chain(stages, random.randint(0, 3), placement)
        costs = replace(chain, edges=(*chain.edges, Edge(0, len(stages) - 2, 9, 2)))
        problem, start = one_by_one(costs, 5)
        units = problem.units(limit_per_rank(costs, random.choice((None, 14, 40))))
        found = Annealing(problem, units, 1).improve(start, 0, 1e18, 3_000)
        assert found.cost < start.cost
        assert evaluated(problem, found.orders, units) == found


def test_annealing_fuses_one_by_one() -> None:
    pytest.importorskip("numba")
    problem, start = one_by_one(CHEAP_WHEN_FUSED, 12)
    units = problem.units(limit_per_rank(CHEAP_WHEN_FUSED, "1x"))
    found = Annealing(problem, units, 0).improve(start, 0, 1e18, 400_000)
    assert problem.seconds(found.cost) <= 4300
    kinds = {action.kind for order in problem.decode(found.orders) for action in order}
    assert kinds == {Kind.F, Kind.B, Kind.W, Kind.BW}


@pytest.mark.slow
def test_backwards_are_fused_and_split_within_one_stage() -> None:
    """Whole stages fused take 4380; with rank i's last 2 i backwards split, 4300."""
    found = plan(CHEAP_WHEN_FUSED, 12, mem_limit="1x", budget_s=2)
    assert found.iteration_s <= 4300
    kinds = [{action.kind for action in order} for order in found.ranks]
    assert {Kind.B, Kind.W, Kind.BW} <= kinds[3]


def test_fusing_one_by_one_is_never_worse_than_whole_stages() -> None:
    for index in range(4):
        stages = [replace(stage, backward_s=stage.work_s - stage.forward_s - 0.5 * (1 + index)) for stage in UNEQUAL]
        costs = CostTable.chain(stages, index)
        search = OrderSearch(costs, 6, None, 0, 1e18, rounds=1)
        search.try_fused()
        whole = search.cost
        search.run()
        assert search.cost <= whole
        assert instance(costs, 6) == search.problem


@pytest.mark.parametrize("name", ["zb-v", "zb-1p", "zb-2p"])
@pytest.mark.parametrize("budget_s", [1e-9, 0.05])
def test_a_named_search_never_loses_to_its_seeds(name: str, budget_s: float) -> None:
    p, m = 8, 32
    seeds = {"zb-v": ("zb-v-order",), "zb-1p": ("1f1b", "zb-h1"), "zb-2p": ("zb-h1", "zb-h2")}[name]
    folds = name == "zb-v"
    placement = (*range(p), *reversed(range(p))) if folds else tuple(range(p))
    costs = CostTable.chain([StageCost(10, 11, 9, 10, 8)] * len(placement), 1, placement)
    found = plan(costs, m, schedule=name, budget_s=budget_s)
    for seed in seeds:
        assert found.iteration_s <= plan(costs, m, schedule=seed).iteration_s
