"""Rules of list scheduling, compiled and not."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from zbfx.plan import CostTable, StageCost
from zbfx.schedule.search.list_scheduling import ListScheduler
from zbfx.schedule.search.rules import PATIENCE_UNIT, Rule, Turn
from zbfx.timing.exact import instance
from zbfx.timing.limits import limit_per_rank


def random_rule(random: Random, stages: int, ranks: int) -> Rule:
    return Rule(
        tuple(random.randint(1, 3) for _ in range(stages)),
        tuple(random.randint(1, 9) for _ in range(stages)),
        tuple(random.randint(-1, PATIENCE_UNIT + 1) for _ in range(ranks)),
        tuple(random.random() < 0.5 for _ in range(ranks)),
        tuple(random.random() < 0.5 for _ in range(ranks)),
        tuple(random.choice(tuple(Turn)) for _ in range(ranks)),
    )


def test_compiled_rules_make_the_schedules_of_rules_that_are_not() -> None:
    pytest.importorskip("numba")
    random, made, refused = Random(0), 0, 0
    for _ in range(60):
        placement = random.choice([(0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2, 3)])
        stages = [StageCost(*(random.randint(1, 7) for _ in range(3)), 3, random.choice((1, 4))) for _ in placement]
        costs = CostTable.chain(stages, random.randint(0, 3), placement)
        problem, limit = instance(costs, 6), random.choice((None, 14, 40))
        units = problem.units(limit_per_rank(costs, limit))
        plain, compiled = ListScheduler(problem, units, 1 << 60), ListScheduler(problem, units, 0)
        rule = random_rule(random, len(placement), max(placement) + 1)
        found = plain.run(rule)
        assert compiled.run(rule) == found
        if found is None:
            refused += 1
        else:
            made += 1
            stop_at = random.choice((found.cost, found.cost + 1, inf))
            assert compiled.run(rule, stop_at) == plain.run(rule, stop_at)
    assert min(made, refused) > 5
