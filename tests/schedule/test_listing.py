"""Rules of list scheduling, compiled and not."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from zbfx.plan import CostTable, StageCost
from zbfx.schedule import V, check
from zbfx.schedule.orders.vshape import zb_v, zb_v_letters
from zbfx.schedule.search.fusing import evaluated, fuse, one_by_one
from zbfx.schedule.search.list_scheduling import ListScheduler
from zbfx.schedule.search.rules import PATIENCE_UNIT, Rule, Turn
from zbfx.timing.exact import instance
from zbfx.timing.limits import limit_per_rank
from zbfx.timing.views import in_ascending_order


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
        times = [[random.randint(1, 7) for _ in range(3)] for _ in placement]
        stages = [StageCost(f, b, w, 3, random.choice((1, 4))) for f, b, w in times]
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


def test_compiled_costs_of_orders_are_those_of_the_simulator() -> None:
    """Orders of rules, some of them fused, and with two actions exchanged: these may deadlock, or hold too much."""
    pytest.importorskip("numba")
    random, fine, refused = Random(1), 0, 0
    costs = CostTable.chain([StageCost(2, 3, 5, 4, 3, backward_s=7), *[StageCost(3, 1, 2, 3, 2)] * 3], 1, (0, 1, 1, 0))
    problem = instance(costs, 4)
    for limit in (None, 18):
        units = problem.units(limit_per_rank(costs, limit))
        compiled = ListScheduler(problem, units, 0).compiled_rules()
        assert compiled is not None
        start = ListScheduler(problem, None).run(random_rule(Random(3), 4, 2))
        starts = [one_by_one(problem)] if start is None else [start.orders, fuse(problem, start.orders, {0})]
        for _ in range(60):
            orders = [list(order) for order in random.choice(starts)]
            order = random.choice(orders)
            a, b = random.randrange(len(order)), random.randrange(len(order))
            order[a], order[b] = order[b], order[a]
            found = evaluated(problem, orders, units)
            assert compiled.evaluate(problem.decode(orders)) == found
            fine, refused = fine + (found is not None), refused + (found is None)
    assert min(fine, refused) > 5


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (3, 7), (4, 5), (5, 20)])
def test_the_letters_of_zb_v_are_its_order(p: int, m: int) -> None:
    costs = CostTable.chain([StageCost(1, 1, 1, 1, 1)] * 2 * p, 0, V.placement(p, 2))
    views = tuple(in_ascending_order(letters, 2 * p, m) for letters in zb_v_letters(costs, m))
    assert views == zb_v(costs, m)
    timed = check(costs, m, views, p * 2)
    assert m < 2 * p or timed.iteration_ticks == 6 * m, "no bubble"
