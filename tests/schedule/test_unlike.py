"""Orders of unlike microbatches and their lower bound, against all orders of small problems and plain relaxation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from random import Random

import pytest

from benchmarks.planner.unlike import drawn, rounded_up
from zbfx.plan import CostTable, Edge, Kind, StageCost
from zbfx.schedule.unlike import Unlike, UnlikePlan, plan_one_by_one, plan_unlike
from zbfx.schedule.unlike.bound import unlike_bound_s

Step = tuple[Kind, int, int]  # kind, stage, microbatch
F, B, W = Kind.F, Kind.B, Kind.W


def problem_of(random: Random, placement: tuple[int, ...], microbatches: int, *, weights: bool) -> Unlike:
    """One microbatch is much longer than the others. `weights`: there are Ws."""
    tables = []
    for k in range(microbatches):
        scale = random.choice((1, 4, 9)) if k == 0 else 1
        stages = [
            StageCost(
                scale * random.randint(1, 6), scale * random.randint(1, 6), scale * random.randint(0, 6) * weights
            )
            for _ in placement
        ]
        pairs = [(s, s + 1) for s in range(len(placement) - 1)]
        edges = tuple(Edge(*pair, random.choice((0, 0, scale)), random.choice((0, 0, scale))) for pair in pairs)
        tables.append(CostTable(tuple(stages), edges, placement))
    return Unlike(tuple(tables))


def seconds(problem: Unlike, step: Step) -> float:
    kind, s, k = step
    cost = problem.tables[k].stages[s]
    return float({F: cost.forward_s, B: cost.backward_input_s, W: cost.backward_weight_s}[kind])


def waits_for(problem: Unlike, step: Step) -> Iterator[tuple[Step, float]]:
    kind, s, k = step
    if kind is not F:
        yield ((F if kind is B else B), s, k), 0.0
    for edge in problem.tables[k].edges:
        here = problem.placement[edge.source] == problem.placement[edge.target]
        if kind is F and edge.target == s and edge.forward_s is not None:
            yield (F, edge.source, k), 0.0 if here else float(edge.forward_s)
        if kind is B and edge.source == s and edge.backward_s is not None:
            yield (B, edge.target, k), 0.0 if here else float(edge.backward_s)


def iteration_s(problem: Unlike, ranks: Sequence[Sequence[Step]]) -> float | None:
    """When every action runs as early as it can: the longest time between a rank's first action and its last; None
    where ranks wait for each other."""
    ends = dict[Step, float]()
    starts = dict[Step, float]()
    at = [0] * len(ranks)
    while any(place < len(rank) for place, rank in zip(at, ranks, strict=True)):
        moved = False
        for r, rank in enumerate(ranks):
            while at[r] < len(rank) and all(other in ends for other, _ in waits_for(problem, rank[at[r]])):
                step = rank[at[r]]
                arrived = [ends[other] + lag for other, lag in waits_for(problem, step)]
                starts[step] = max([0.0, *arrived, *([ends[rank[at[r] - 1]]] if at[r] else [])])
                ends[step] = starts[step] + seconds(problem, step)
                at[r] += 1
                moved = True
        if not moved:
            return None
    return max(ends[rank[-1]] - starts[rank[0]] for rank in ranks)


def way_s(problem: Unlike, k: int) -> float:
    """From the first F to the last W where nothing keeps the microbatch waiting."""
    stages = range(len(problem.placement))
    lags = [lag for s in stages for kind in (F, B) for other, lag in waits_for(problem, (kind, s, k)) if other[1] != s]
    return (
        sum(seconds(problem, (kind, s, k)) for s in stages for kind in (F, B)) + sum(lags) + seconds(problem, (W, 0, k))
    )


def merged(chains: Sequence[tuple[Step, ...]]) -> Iterator[tuple[Step, ...]]:
    """All ways to put chains into one row."""
    if len(chains) == 1:
        yield chains[0]
        return
    for rest in merged(chains[1:]):
        for places in combinations(range(len(rest) + len(chains[0])), len(chains[0])):
            own, others = iter(chains[0]), iter(rest)
            yield tuple(next(own) if p in places else next(others) for p in range(len(rest) + len(chains[0])))


def all_orders(problem: Unlike, *, weights: bool) -> Iterator[tuple[tuple[Step, ...], ...]]:
    kinds = (F, B, W) if weights else (F, B)
    ranks = []
    for rank in range(problem.rank_count):
        (*stages,) = [s for s, place in enumerate(problem.placement) if place == rank]
        chains = []
        for k in range(len(problem.tables)):
            there = [(F, s, k) for s in stages]
            back = [(kind, s, k) for s in reversed(stages) for kind in kinds[1:]]
            chains.append(tuple(there + back))
        ranks.append(list(merged(chains)))
    return product(*ranks)


def steps_of(plan: UnlikePlan) -> list[list[Step]]:
    return [[(a.kind, a.stage, plan.order[a.microbatch]) for a in rank] for rank in plan.schedule.ranks]


@pytest.mark.parametrize(
    ("placement", "microbatches", "weights"),
    [((0, 1, 2), 2, True), ((0, 1), 3, False), ((0, 1, 1, 0), 2, False)],
    ids=["three ranks", "three microbatches", "there and back"],
)
def test_no_order_of_a_small_problem_is_shorter_than_the_bound(
    placement: tuple[int, ...], microbatches: int, weights: bool
) -> None:
    met = beyond = 0
    for seed in range(5, 11):
        problem = problem_of(Random(seed), placement, microbatches, weights=weights)
        found = (iteration_s(problem, ranks) for ranks in all_orders(problem, weights=weights))
        best = min(length for length in found if length is not None)
        bound = unlike_bound_s(problem)
        assert bound <= best + 1e-9, f"seed {seed}"
        met += abs(bound - best) < 1e-9
        work = [
            sum(
                seconds(problem, (kind, s, k))
                for s in range(len(placement))
                if placement[s] == rank
                for kind in (F, B, W)
                for k in range(microbatches)
            )
            for rank in range(problem.rank_count)
        ]
        ways = [way_s(problem, k) for k in range(microbatches)]
        beyond += bound > max(*ways, *work) + 1e-9
    assert met, "the bound is never met"
    assert beyond, "the bound is no more than a rank's work and a microbatch's way"


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 2, 2, 1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("keep_order", [False, True])
def test_a_plan_runs_every_action_once_and_as_long_as_it_says(placement: tuple[int, ...], keep_order: bool) -> None:
    problem = problem_of(Random(1), placement, 7, weights=True)
    plan = plan_unlike(problem, keep_order=keep_order)
    assert plan is not None
    steps = steps_of(plan)
    assert sorted(map(str, (step for rank in steps for step in rank))) == sorted(
        str((kind, s, k)) for kind in (F, B, W) for s in range(len(placement)) for k in range(7)
    )
    assert iteration_s(problem, steps) == pytest.approx(plan.schedule.iteration_s, rel=1e-12)
    for s in range(len(placement)):
        for kind in (F, B) if keep_order else (F,):
            run = [k for rank in steps for found, stage, k in rank if (found, stage) == (kind, s)]
            assert run == list(plan.order)
    assert not keep_order or plan.order == tuple(range(7))


def decoder(random: Random, mix: str, ranks: int, microbatches: int) -> Unlike:
    """Work that grows with a length, and with its square in attention."""
    tables = []
    for _ in range(microbatches):
        length = rounded_up(drawn(random, mix))
        linear, square = length / 1000, (length / 4000) ** 2
        cost = StageCost(
            linear + square, linear + 2 * square, linear, saved_bytes=4 * length, weight_saved_bytes=3 * length
        )
        tables.append(CostTable.chain([cost] * ranks, comm_s=0.001))
    return Unlike(tuple(tables))


@pytest.mark.slow
@pytest.mark.parametrize(("mix", "most"), [("recipes", 0.03), ("web", 0.13)])
def test_gaps_on_published_length_mixes(mix: str, most: float) -> None:
    gaps = []
    for seed in range(8):
        plan = plan_unlike(decoder(Random(seed), mix, 8, 32))
        assert plan is not None
        gaps.append(plan.schedule.gap)
    assert sum(gaps) / len(gaps) <= most, gaps


def test_plans_stay_within_limits_that_bind() -> None:
    free = decoder(Random(0), "web", 4, 12)
    plan = plan_unlike(free)
    assert plan is not None
    least = plan_one_by_one(free).schedule.peak_bytes
    for share in (0.3, 0.1, 0.0):
        limits = tuple(low + share * (high - low) for low, high in zip(least, plan.schedule.peak_bytes, strict=True))
        bound = plan_unlike(Unlike(free.tables, limits)) or plan_one_by_one(free)
        for rank, steps in enumerate(steps_of(bound)):
            held = most = 0.0
            for kind, s, k in steps:
                cost = free.tables[k].stages[s]
                saved, later = float(cost.saved_bytes), float(cost.weight_saved_bytes)
                held += {F: saved, B: later - saved, W: -later}[kind]
                most = max(most, held)
            assert most <= limits[rank] + 1e-6
            assert most == pytest.approx(bound.schedule.peak_bytes[rank])
