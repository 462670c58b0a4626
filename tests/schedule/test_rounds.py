"""Schedules of a V in rounds."""

from __future__ import annotations

from time import perf_counter

import pytest

from benchmarks.planner.frontier import GREEDY_ZB_V
from benchmarks.planner.paper_settings import settings
from zbfx.plan import CostTable, StageCost
from zbfx.schedule import check
from zbfx.schedule.orders.vshape import v_placement
from zbfx.schedule.search.rounds import in_rounds
from zbfx.timing.exact import instance
from zbfx.timing.limits import limit_per_rank

SETTINGS = {(setting.model, setting.microbatches): setting for setting in settings()}


@pytest.mark.parametrize("key", [("14.6B", 48), ("14.6B", 64)], ids=str)
def test_rounds_are_as_good_as_the_published_greedy(key: tuple[str, int]) -> None:
    setting = SETTINGS[key]
    costs = setting.v_shaped()
    problem = instance(costs, setting.microbatches)
    found = in_rounds(problem, problem.units(limit_per_rank(costs, "1x")), perf_counter() + 20)
    assert found is not None
    work_s = 2 * setting.microbatches * float(costs.stages[0].work_s)
    assert round(1 - work_s / problem.seconds(found.cost), 4) <= GREEDY_ZB_V[key]


@pytest.mark.slow
@pytest.mark.parametrize("p", [1, 2, 3, 6])
@pytest.mark.parametrize("m", [1, 2, 7, 20])
def test_rounds_of_unequal_stages_keep_the_limit_or_give_up(p: int, m: int) -> None:
    stages = [StageCost(2 + i % 3, 3 + i % 2, 5, 4 + i % 2, 3) for i in range(2 * p)]
    costs = CostTable.chain(stages, 7, v_placement(p))
    problem = instance(costs, m)
    assert in_rounds(problem, None, perf_counter() + 20) is not None
    for limit in ("1x", "1.5x"):
        found = in_rounds(problem, problem.units(limit_per_rank(costs, limit)), perf_counter() + 20)
        if found is not None:
            timed = check(costs, m, problem.decode(found.orders), limit)
            assert timed.iteration_ticks == found.cost
