"""Integer programs against brute force and against solvers that lie.

Run: pytest tests/schedule/test_refine.py (needs python-mip).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbfx.plan import CostTable, StageCost
from zbfx.schedule import plan
from zbfx.schedule.integer.formulation import IntegerProgram
from zbfx.schedule.integer.precedence import forced_precedence
from zbfx.schedule.integer.solver import Answer, SolverFailed, solve_in_child
from zbfx.schedule.integer.window import TimedOrders, open_window
from zbfx.schedule.search import refine
from zbfx.schedule.search.fusing import evaluated
from zbfx.schedule.search.order_search import OrderSearch
from zbfx.schedule.search.refine import Refinement, Solve, decides, optimum, refine_search, replaced
from zbfx.timing.exact import B, F, Instance, W, instance

pytestmark = pytest.mark.solver

CodedOrders = tuple[tuple[int, ...], ...]


def cost_of(problem: Instance, orders: Sequence[Sequence[int]], limits: Sequence[int] | None) -> int | None:
    """In ticks; None if the orders deadlock or do not fit."""
    listed = evaluated(problem, orders, limits)
    return None if listed is None else listed.cost


def stage_orders(problem: Instance, stage: int) -> Iterator[tuple[int, ...]]:
    """Every order of one stage's Fs, Bs and Ws that keeps microbatches in order within each kind."""
    m = problem.microbatches

    def extend(order: tuple[int, ...], a: int, b: int, c: int) -> Iterator[tuple[int, ...]]:
        if c == m:
            yield order
        for kind, done, allowed in ((F, a, a < m), (B, b, b < a), (W, c, c < b)):
            if allowed:
                code = (kind * problem.stage_count + stage) * m + done
                yield from extend((*order, code), a + (kind == F), b + (kind == B), c + (kind == W))

    return extend((), 0, 0, 0)


def best_by_brute_force(problem: Instance, limits: Sequence[int] | None) -> tuple[int, CodedOrders]:
    """The cheapest of all orders, one stage per rank."""
    best: tuple[int, CodedOrders] | None = None
    for orders in product(*(list(stage_orders(problem, stage)) for stage in range(problem.stage_count))):
        cost = cost_of(problem, orders, limits)
        if cost is not None and (best is None or cost < best[0]):
            best = cost, orders
    assert best is not None
    return best


times = st.integers(1, 9)
stages = st.builds(StageCost, times, times, times, saved_bytes=st.just(2), weight_saved_bytes=st.integers(0, 2))


@st.composite
def tiny_problems(draw: st.DrawFn) -> tuple[Instance, list[int] | None]:
    p, m = draw(st.sampled_from([(2, 2), (2, 3), (3, 2)]))
    costs = CostTable.chain(draw(st.lists(stages, min_size=p, max_size=p)), draw(st.integers(0, 5)))
    limit = draw(st.sampled_from([None, 4, 5, 6]))
    problem = instance(costs, m)
    return problem, None if limit is None else [limit] * p


@given(tiny_problems())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_forced_orders_hold_in_the_best_schedule_and_refute_nothing_cheaper(
    case: tuple[Instance, list[int] | None],
) -> None:
    problem, limits = case
    cost, orders = best_by_brute_force(problem, limits)
    timed = TimedOrders.of(problem, orders)
    window = open_window(timed, 0, len(timed.codes))
    assert window.cost_ticks == max(timed.spans_ticks) == cost
    forced = forced_precedence(window, cost, limits)
    assert forced is not None
    for b, start in enumerate(window.starts):
        assert forced.heads[b] <= start
        assert start + window.ticks[b] <= forced.ends[b]
    # Actions are numbered in their order, so on one rank only a lower number may be forced before a higher one.
    assert all(not forced.before[a] >> b & 1 for a, b in pairs_of_one_rank(window.ranks))


def pairs_of_one_rank(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((a, b) for b in range(len(ranks)) for a in range(b) if ranks[a] == ranks[b])


@given(tiny_problems())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_program_equals_brute_force(case: tuple[Instance, list[int] | None]) -> None:
    problem, limits = case
    cost, _ = best_by_brute_force(problem, limits)
    worst = max(
        (found, orders)
        for orders in product(*(list(stage_orders(problem, stage)) for stage in range(problem.stage_count)))
        if (found := cost_of(problem, orders, limits)) is not None
    )[1]
    result = optimum(problem, worst, limits, 0, 60)
    assert (result.cost_ticks, result.proven) == (cost, True)


def paper_like(microbatches: int) -> CostTable:
    """The 1.5B model's times and memory ratio (34h + 5as) : 32h with h = 2304, a = 24, s = 1024."""
    stage = StageCost(18.522, 18.086, 9.337, 34 * 2304 + 5 * 24 * 1024, 32 * 2304)
    return CostTable.chain([stage] * 4, 0.601)


EQUAL = CostTable.chain([StageCost(1, 1, 1, 2, 1)] * 4)


@pytest.mark.parametrize(
    ("costs", "limit", "cost_s"),
    [(EQUAL, "1x", 21), (EQUAL, "2x", 19), (paper_like(6), "1x", 364.695), (paper_like(6), "2x", 342.415)],
    ids=["equal-1x", "equal-2x", "1.5B-1x", "1.5B-2x"],
)
def test_four_ranks_six_microbatches_are_solved_to_optimality(costs: CostTable, limit: str, cost_s: float) -> None:
    found = plan(costs, 6, schedule="auto", mem_limit=limit, budget_s=2)
    assert found.iteration_s == pytest.approx(cost_s, rel=1e-12)
    problem = instance(costs, 6)
    begun = problem.encode(plan(costs, 6, schedule="zb-h1").ranks)
    result = optimum(problem, begun, problem.units(found.mem_limit), 0, 60)
    assert result.proven
    assert problem.seconds(result.cost_ticks) == pytest.approx(found.iteration_s, rel=1e-12)


def never_asked(program: IntegerProgram, limit_s: float) -> Answer:
    raise AssertionError("no solver is needed")


def test_an_incumbent_that_meets_the_bound_stops_at_once() -> None:
    problem = instance(EQUAL, 6)
    orders = problem.encode(plan(EQUAL, 6, schedule="zb-h1").ranks)
    assert optimum(problem, orders, None, 21 * problem.ticks_per_s, 60, never_asked).proven


UNEVEN = CostTable.chain([StageCost(f, b, w, 4, 2) for f, b, w in ((2, 3, 5), (3, 2, 2), (2, 4, 3), (4, 3, 2))], 1)


def uneven() -> tuple[Instance, list[list[int]], list[int]]:
    """Four unequal stages, eight microbatches, under ZB-H1, which is not optimal for them."""
    problem = instance(UNEVEN, 8)
    return problem, problem.encode(plan(UNEVEN, 8, schedule="zb-h1").ranks), [24] * 4


def refinement(solver: Solve = solve_in_child, seconds: float = 30) -> Refinement:
    problem, orders, limits = uneven()
    deadline = perf_counter() + seconds
    return Refinement(problem, tuple(map(tuple, orders)), limits, 80, deadline, solve=solver)


def test_windows_improve_a_schedule_within_the_limit() -> None:
    work = refinement()
    before = work.cost_ticks
    work.run()
    assert (before, work.cost_ticks) == (98, 94)
    assert cost_of(work.problem, work.orders, work.limits) == work.cost_ticks


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import os; os.abort()", "Aborted"),
        ("print('nonsense')", "cannot be read"),
        ("raise ImportError(\"No module named 'mip'\")", "pip install mip"),
        ("import time; time.sleep(100)", "did not stop within"),
    ],
)
def test_a_broken_solver_leaves_the_orders(code: str, note: str) -> None:
    def run_code(program: IntegerProgram, limit_s: float) -> Answer:
        return solve_in_child(program, min(limit_s, 1.0), command=(sys.executable, "-c", code))

    work = refinement(run_code)
    before = work.orders, work.cost_ticks, work.bound_ticks
    work.run()
    assert (work.orders, work.cost_ticks, work.bound_ticks) == before
    assert any(note in line for line in work.notes)


def lies(program: IntegerProgram, limit_s: float, *, kind: str) -> Answer:
    """The columns' first or last values, called optimal."""
    values = program.upper if kind == "last" else program.lower
    return Answer(tuple(values), True, False, values[0], 0.0)


@pytest.mark.parametrize("kind", ["first", "last"])
def test_an_order_that_breaks_its_promise_is_not_taken(kind: str) -> None:
    work = refinement(partial(lies, kind=kind))
    work.run()
    assert cost_of(work.problem, work.orders, work.limits) == work.cost_ticks <= 98
    assert work.bound_ticks == 80


def test_optimum_refuses_an_order_that_breaks_its_promise() -> None:
    problem, orders, limits = uneven()
    with pytest.raises(SolverFailed, match="does not keep what its objective promises"):
        optimum(problem, orders, limits, 0, 60, partial(lies, kind="last"))


def test_a_window_alone_costs_what_the_whole_costs() -> None:
    problem, orders, _ = uneven()
    timed = TimedOrders.of(problem, orders)
    for first, last in ((0, 20), (7, 40), (60, 96), (0, 96)):
        window = open_window(timed, first, last)
        assert window.cost_ticks == max(timed.spans_ticks)
        assert replaced(timed, first, last, window.in_order(window.starts)) == [tuple(order) for order in orders]


def test_fused_backwards_and_rebased_ranks_are_not_called_decided() -> None:
    problem, orders, _ = uneven()
    assert decides(problem, orders)
    fused = instance(CostTable.chain([StageCost(1, 1, 1, backward_s=1)] * 2), 2)
    assert not decides(fused, ())
    assert not decides(instance(CostTable.chain([StageCost(1, 1, 1)] * 3, 0, [0, 0, 1]), 2), ())


@pytest.mark.parametrize("name", ["ilp", "auto"])
def test_the_planner_ends_with_integer_programs(name: str) -> None:
    found = plan(UNEVEN, 8, schedule=name, mem_limit=24, budget_s=20)
    assert (found.iteration_s, found.lower_bound_s, found.gap) == (94, 94, 0)


def test_the_planner_does_without_python_mip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refine, "solvers", tuple)
    search = searched()
    refine_search(search, perf_counter() + 30)
    assert search.cost == 98
    assert search.notes[-1] == "integer program: not tried; it needs python-mip: pip install mip"


def test_what_integer_programs_find_is_the_searchs_result() -> None:
    search = searched()
    refine_search(search, perf_counter() + 30)
    found = search.result()
    assert found.cost_s == found.bound_s == 94


def searched() -> OrderSearch:
    """A search that has seen ZB-H1 and had no time for more."""
    search = OrderSearch(UNEVEN, 8, [24] * 4, 0, perf_counter())
    search.compare("zb-h1", plan(UNEVEN, 8, schedule="zb-h1").ranks)
    assert search.cost == 98
    return search
