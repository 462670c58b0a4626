"""Lower bounds against the exhaustive optimum of tiny pipelines and against schedules of larger ones."""

from __future__ import annotations

from fractions import Fraction
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.random_instances import random_cases
from tests.schedule.exhaustive import best_cost
from zbfx.plan import CostTable, StageCost
from zbfx.schedule import plan
from zbfx.schedule.bounds.certificate import Certificate
from zbfx.schedule.bounds.chain import linear_pipeline, split_only
from zbfx.schedule.bounds.closed_form import (
    head_tail_bound,
    one_rank_bound,
    stream_bound,
    ways_on_ranks,
    work_bound,
)
from zbfx.schedule.bounds.propagation import Propagation
from zbfx.schedule.search.list_scheduling import ListScheduler
from zbfx.schedule.search.rules import first_rules
from zbfx.timing.exact import instance

UNEQUAL = CostTable.chain([StageCost(2, 3, 5, 4, 3), StageCost(3, 2, 1, 4, 2)], 7)


@st.composite
def problems(draw: st.DrawFn, most_ranks: int, most_microbatches: int) -> tuple[CostTable, int, int | None]:
    """A linear pipeline, its microbatches and a limit under which something fits."""
    p, m = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_microbatches))
    seconds = st.integers(0, 9)
    stages = [
        StageCost(draw(seconds), draw(seconds), draw(seconds), draw(st.integers(1, 4)), draw(st.integers(0, 4)))
        for _ in range(p)
    ]
    comm = [draw(st.integers(0, 5)) for _ in range(p - 1)]
    costs = CostTable.chain(stages, comm, backward_comm_s=[draw(st.integers(0, 5)) for _ in range(p - 1)])
    least = max(max(stage.saved_bytes, stage.weight_saved_bytes) for stage in stages)
    extra = draw(st.one_of(st.none(), st.integers(0, 8)))
    return costs, m, None if extra is None else int(least) + extra


def all_bounds(costs: CostTable, m: int, limit: int | None) -> dict[str, Fraction]:
    problem = instance(split_only(costs), m)
    units = problem.units(None if limit is None else [limit] * costs.rank_count)
    pipe = linear_pipeline(problem, units)
    assert pipe is not None
    ticks = {
        "work": work_bound(problem),
        "one rank": one_rank_bound(problem, units, ways_on_ranks(problem)),
        "head and tail": head_tail_bound(pipe).cost,
        "stream": stream_bound(pipe),
    }
    return {name: Fraction(value, problem.ticks_per_s) for name, value in ticks.items()}


@pytest.mark.slow
@given(problems(most_ranks=2, most_microbatches=3))
@settings(max_examples=150, deadline=None)
def test_no_bound_exceeds_the_exhaustive_optimum(problem: tuple[CostTable, int, int | None]) -> None:
    costs, m, limit = problem
    optimum = best_cost(costs, m, limit)
    for name, bound in all_bounds(costs, m, limit).items():
        assert bound <= optimum, name
    certificate = Certificate(costs, m, None if limit is None else [limit] * costs.rank_count)
    certificate.raise_towards(Fraction(optimum), perf_counter() + 10)
    assert certificate.seconds <= optimum


@pytest.mark.slow
@given(problems(most_ranks=4, most_microbatches=8))
@settings(max_examples=100, deadline=None)
def test_no_bound_exceeds_any_schedule(problem: tuple[CostTable, int, int | None]) -> None:
    costs, m, limit = problem
    limits = None if limit is None else [limit] * costs.rank_count
    certificate = Certificate(costs, m, limits)
    inside = instance(costs, m)
    scheduler = ListScheduler(inside, inside.units(limits))
    found = [scheduler.run(rule) for rule in first_rules(inside, inside.units(limits), certificate.warm_up)]
    costs_found = [Fraction(listed.cost, inside.ticks_per_s) for listed in found if listed is not None]
    if costs_found:
        certificate.raise_towards(min(costs_found), perf_counter() + 10)
        assert certificate.seconds <= min(costs_found)


FOLDED = ((0, 0), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (1, 0, 0, 1), (0, 1, 0), (0, 0, 0))


@st.composite
def folded_problems(draw: st.DrawFn, most_stages: int) -> tuple[CostTable, int | None]:
    """A chain with several stages on a rank, and a limit under which one microbatch fits."""
    placement = draw(st.sampled_from([placement for placement in FOLDED if len(placement) <= most_stages]))
    seconds, sizes = st.integers(0, 9), st.integers(0, 4)
    stages = [StageCost(draw(seconds), draw(seconds), draw(seconds), draw(sizes), draw(sizes)) for _ in placement]
    costs = CostTable.chain(stages, [draw(st.integers(0, 5)) for _ in stages[1:]], placement)
    least = sum(max(stage.saved_bytes, stage.weight_saved_bytes) for stage in stages)
    extra = draw(st.one_of(st.none(), st.integers(0, 6)))
    return costs, None if extra is None else int(least) + extra


@given(folded_problems(most_stages=4))
@settings(max_examples=40, deadline=None)
def test_no_bound_of_a_folded_pipeline_exceeds_the_exhaustive_optimum(problem: tuple[CostTable, int | None]) -> None:
    costs, limit = problem
    m = 2 if len(costs.stages) == 2 and limit is not None and limit < 6 else 1
    optimum = best_cost(costs, m, limit)
    certificate = Certificate(costs, m, None if limit is None else [limit] * costs.rank_count)
    certificate.raise_towards(Fraction(optimum), perf_counter() + 10)
    assert certificate.seconds <= optimum


@pytest.mark.slow
@given(folded_problems(most_stages=6), st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_no_bound_of_a_folded_pipeline_exceeds_any_schedule(problem: tuple[CostTable, int | None], m: int) -> None:
    costs, limit = problem
    limits = None if limit is None else [limit] * costs.rank_count
    inside = instance(costs, m)
    scheduler = ListScheduler(inside, inside.units(limits))
    listed = [scheduler.run(rule) for rule in first_rules(inside, inside.units(limits), None)]
    best = min((Fraction(found.cost, inside.ticks_per_s) for found in listed if found is not None), default=None)
    if best is not None:
        certificate = Certificate(costs, m, limits)
        certificate.raise_towards(best, perf_counter() + 10)
        assert certificate.seconds <= best


def test_propagation_closes_the_gap_of_an_interleaved_pipeline() -> None:
    """Twelve unequal stages on six ranks, seven microbatches: work alone bounds the step by 45927, and a schedule of
    54137 is known."""
    forward = (1674, 1027, 1249, 990, 968, 969, 971, 1172, 966, 1132, 1064, 1351)
    backward = (1717, 1021, 1163, 1013, 996, 926, 974, 1221, 899, 1131, 1029, 1442)
    weight = (761, 498, 573, 471, 456, 426, 464, 529, 448, 534, 473, 648)
    stages = [StageCost(f, b, w) for f, b, w in zip(forward, backward, weight, strict=True)]
    costs = CostTable.chain(stages, (14, 130, 262, 171, 256, 266, 241, 27, 194, 17, 69), (0, 1, 2, 3, 4, 5) * 2)
    certificate = Certificate(costs, 7, None)
    assert certificate.seconds == 45927
    certificate.raise_towards(Fraction(54137), perf_counter() + 10)
    assert 54050 < certificate.seconds <= 54137


@pytest.mark.parametrize("m", [2, 3])
@pytest.mark.parametrize("limit", [4, 6, 7, 8, 11, None])
def test_the_planner_finds_and_proves_the_exhaustive_optimum(m: int, limit: int | None) -> None:
    optimum = best_cost(UNEQUAL, m, limit)
    found = plan(UNEQUAL, m, mem_limit=limit, budget_s=3)
    assert found.iteration_s == optimum
    assert found.lower_bound_s <= optimum


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_the_planner_finds_the_exhaustive_optimum_of_a_v(limit: int) -> None:
    stages = [StageCost(2, 3, 1), StageCost(3, 1, 2), StageCost(1, 2, 1), StageCost(2, 2, 3)]
    costs = CostTable.chain(stages, 1, placement=(0, 1, 1, 0))
    assert plan(costs, 1, mem_limit=limit, budget_s=3).iteration_s == best_cost(costs, 1, limit)


def test_propagation_proves_what_the_closed_forms_leave_open() -> None:
    """Four microbatches through eight unequal stages: only the bound by contradiction reaches the optimum."""
    case = random_cases(seed=0, count=3)[2]
    found = plan(case.costs, case.microbatches, budget_s=5)
    assert found.gap == 0
    assert max(all_bounds(case.costs, case.microbatches, None).values()) < found.iteration_s


def test_possible_times_hold_every_schedule_of_their_cost() -> None:
    problem = instance(UNEQUAL, 3)
    pipe = linear_pipeline(problem, None)
    assert pipe is not None
    found = plan(UNEQUAL, 3, budget_s=2)
    states = Propagation.of(pipe, 1000)
    assert states is not None
    times = states.possible_times(round(found.iteration_s))
    assert times is not None
    assert states.possible_times(round(found.iteration_s) - 1) is None
    for spans in found.spans:
        for span in spans:
            index = "FBW".index(str(span.action.kind)), span.action.stage, span.action.microbatch
            assert times.earliest[index] <= span.start_s
            assert span.end_s <= times.latest[index]


def test_a_fused_backward_that_saves_time_lowers_the_bound() -> None:
    fused = CostTable.chain([StageCost(1, 2, 1, backward_s=2)] * 3, 0)
    apart = CostTable.chain([StageCost(1, 2, 1)] * 3, 0)
    assert Certificate(fused, 6, None).seconds < Certificate(apart, 6, None).seconds
    assert plan(fused, 6, budget_s=2).iteration_s < plan(apart, 6, budget_s=2).iteration_s
