"""Many ranks: arrays are like tuples, the fast check agrees with the slow one, passes keep the limit and the time."""

from __future__ import annotations

import pickle
from random import Random
from time import perf_counter

import pytest

from zbfx import Action, CostTable, Kind, StageCost
from zbfx.schedule import V, check, plan
from zbfx.schedule.bounds.closed_form import paths_from, ways_on_ranks
from zbfx.schedule.orders.handmade import zb_h1
from zbfx.schedule.orders.vshape import zb_v
from zbfx.schedule.orders.written import read_orders
from zbfx.schedule.search.rules import arrival_shapes, arrived
from zbfx.timing.exact import B, W, instance
from zbfx.timing.validity import keeps_rules
from zbfx.timing.views import ActionView

SLOW_ENDS = [StageCost(5, 6, 4, 10, 5), *[StageCost(4, 5, 3, 10, 5)] * 30, StageCost(5, 6, 4, 10, 5)]


def test_views_are_like_tuples() -> None:
    (order,) = read_orders(["F0.0 F0.1 B0.0 BW0.1 W0.0"])
    problem = instance(CostTable.chain([StageCost(2, 3, 5)]), 2)
    view = problem.decode(problem.encode([order]))[0]
    assert isinstance(view, ActionView)
    assert view == order
    assert order == view
    assert (view,) == (order,)
    assert view != order[:-1]
    assert view != (*order[:-1], Action(Kind.W, 0, 1))
    assert (hash(view), repr(view), len(view), view[-1], view[1:3]) == (
        hash(order), repr(order), 5, order[-1], order[1:3],
    )  # fmt: skip
    assert view[::-2] == order[::-2]
    assert pickle.loads(pickle.dumps(view)) == order
    with pytest.raises(IndexError):
        view[5]
    spans = plan(CostTable.chain([StageCost(2, 3, 5)]), 2, schedule=[order]).spans[0]
    assert [(span.start_s, span.end_s) for span in spans] == [(0, 2), (2, 4), (4, 7), (7, 15), (15, 20)]


@pytest.mark.parametrize("seed", range(60))
def test_the_fast_check_refuses_what_the_slow_one_does(seed: int) -> None:
    """One random change to correct orders; every action is looked at by hand here."""
    random = Random(seed)
    costs, m = CostTable.chain([StageCost(1, 1, 1)] * 4, 0, V.placement(2, 2)), 3
    problem = instance(costs, m)
    orders = [list(order) for order in zb_v(costs, m)]
    order = orders[random.randrange(2)]
    a, b = random.randrange(len(order)), random.randrange(len(order))
    change = random.randrange(4)
    if change == 0:
        order[a], order[b] = order[b], order[a]
    elif change == 1:
        del order[a]
    elif change == 2:
        order.insert(a, order[b])
    else:
        orders[0].append(orders[1].pop(a))
    right = True
    for rank, actions in enumerate(orders):
        right &= all(costs.placement[action.stage] == rank for action in actions)
        for stage in costs.stages_of(rank):
            places = {kind: [i for i, x in enumerate(actions) if (x.kind, x.stage) == (kind, stage)] for kind in Kind}
            own = {kind: [actions[i].microbatch for i in found] for kind, found in places.items()}
            right &= own[Kind.F] == list(range(m)) and all(sorted(own[k]) == [0, 1, 2] for k in (Kind.B, Kind.W))
            if right:
                at = {(k, j): i for k in own for i, j in zip(places[k], own[k], strict=True)}
                right &= all(at[Kind.F, j] < at[Kind.B, j] < at[Kind.W, j] for j in range(m))
    assert keeps_rules(problem, problem.encode(orders)) == right


def test_ways_on_ranks_are_the_longest_paths() -> None:
    costs = CostTable.chain([StageCost(k + 2, 2 * k + 3, 5) for k in range(8)], list(range(1, 8)), V.placement(4, 2))
    problem = instance(costs, 3)
    found = ways_on_ranks(problem)
    assert len(found) == 16
    for (stage, other), way in found.items():
        paths = paths_from(problem, stage)
        assert way == (paths[B * 8 + other], paths[W * 8 + other])
    huge = instance(CostTable.chain([StageCost(1e60, 2e60, 3e60)] * 2), 3)
    assert ways_on_ranks(huge)[0, 0] == (paths_from(huge, 0)[2], paths_from(huge, 0)[4])


def test_arrivals_by_hand() -> None:
    """Fs of the slow first stage, F=9, end at 9, 18, 27, 36; those of stage 1, F=4, at 15, 24, 33. Its first B can
    start at 26: two Fs have run, although there is time for more."""
    stages = [StageCost(9, 3, 1), *[StageCost(4, 3, 1)] * 2]
    problem = instance(CostTable.chain(stages, 2), 9)
    # Stage 2: F0 ends at 9 + 2 + 4 + 2 + 4 = 21. Its B0 ends at 24, there at 26; that of stage 1 at 29, there at 31.
    assert arrived(problem) == [3, 2, 1]
    assert arrival_shapes(problem, [9, 1, 9]) == [((3, 1, 1), (3, 1, 1)), ((3, 1, 1), (9, 1, 9))]
    assert arrival_shapes(instance(CostTable.chain(stages[1:], 2), 9), [9, 9]) == []


def test_slow_ends_are_planned_to_their_bound() -> None:
    found = plan(CostTable.chain(SLOW_ENDS, 1), 64, mem_limit="1.5x", budget_s=2)
    assert found.gap < 0.01
    assert found.iteration_s < plan(CostTable.chain(SLOW_ENDS, 1), 64, schedule="zb-h1").iteration_s


@pytest.mark.slow
def test_large_problems_keep_the_limit_and_know_a_start() -> None:
    costs = CostTable.chain(SLOW_ENDS * 4, 1)
    begun = perf_counter()
    found = plan(costs, 170, mem_limit="1x", budget_s=0.2)
    assert perf_counter() - begun < 30, "passes that do not end in time do not begin"
    again = check(costs, 170, found.ranks, "1x")
    assert (again.iteration_s, again.peak_bytes) == (found.iteration_s, found.peak_bytes)
    start = plan(costs, 170, schedule="zb-h1", mem_limit="1x")
    assert found.iteration_s == start.iteration_s, "no list schedule would have ended in time"
    assert start.ranks == zb_h1(costs, 170)
