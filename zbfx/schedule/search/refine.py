"""Improve a schedule by integer programs: free the order inside a window, keep the rest, take what is better.

Takes   an `Instance`, orders, a limit per rank, a lower bound, a deadline.
Gives   orders that cost no more, and a better bound where the whole problem is decided. Windows slide over the schedule
        and grow when none of their size helps any more. `precedence` refutes many before a solver sees them.
Raises  nothing; `optimum` raises `SolverFailed`. No order is believed: it is simulated and its memory summed again.
Source  appendix G of the paper; the windows are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from time import perf_counter

from zbfx.schedule.integer.formulation import IntegerProgram, formulate, starts_of
from zbfx.schedule.integer.precedence import Precedence, forced_precedence
from zbfx.schedule.integer.solver import Answer, SolverFailed, solve_with_any, solvers
from zbfx.schedule.integer.window import TimedOrders, open_window
from zbfx.schedule.search.fusing import evaluated, unfuse
from zbfx.schedule.search.list_scheduling import Listed
from zbfx.schedule.search.order_search import OrderSearch
from zbfx.timing.exact import BW, B, Instance, W

Solve = Callable[[IntegerProgram, float], Answer]

FIRST_PAIRS, FIRST_LIMIT_S, GROWTH = 120, 8.0, 1.6  # open pairs of a window, seconds for it; growth per idle sweep
LEAST_S = 0.7  # less is not worth starting a solver
MOST_ACTIONS = 800  # of a window: forced orders take time that grows with the square
MOST_FAILURES = 3
RESOLUTION = 100_000  # gains below the longest action divided by this drown in a solver's tolerances


@dataclass
class Refinement:
    """One problem and its best orders so far. `cost_ticks` and `bound_ticks` enclose the optimal cost. `limits`: memory
    units per rank. `deadline_s`: a reading of perf_counter."""

    problem: Instance
    orders: tuple[tuple[int, ...], ...]
    limits: Sequence[int] | None
    bound_ticks: int
    deadline_s: float
    seed: int = 0
    solve: Solve = solve_with_any
    notes: list[str] = field(default_factory=list)
    failures: int = 0  # of the solver, one after the other
    settled: bool = False

    def __post_init__(self) -> None:
        self.take(TimedOrders.of(self.problem, self.orders))
        self.least_gain = max(1, max(self.problem.ticks) // RESOLUTION)

    def take(self, timed: TimedOrders) -> None:
        self.timed, self.orders, self.cost_ticks = timed, timed.orders, max(timed.spans_ticks)

    def running(self) -> bool:
        open_gap = self.cost_ticks - self.bound_ticks >= self.least_gain
        working = not self.settled and self.failures < MOST_FAILURES
        return open_gap and working and self.deadline_s - perf_counter() > LEAST_S

    def run(self) -> None:
        """Refine until the bound is met, the whole problem is settled, the solver keeps failing, or the time is up."""
        random = Random(self.seed)
        pairs, limit_s = FIRST_PAIRS, FIRST_LIMIT_S
        while self.running():
            cost = self.cost_ticks
            self.sweep(random, pairs, limit_s)
            if self.cost_ticks == cost:
                pairs, limit_s = int(pairs * GROWTH), limit_s * GROWTH

    def sweep(self, random: Random, pairs: int, limit_s: float) -> None:
        """Windows of about `pairs` open pairs over the whole length, from a random start, each overlapping the next."""
        first, last, total = 0, 0, len(self.timed.codes)
        while last < total and self.running():
            last, forced = self.widest(first, pairs)
            refuted = forced is None or self.improve(first, last, forced, limit_s)
            if refuted and (first, last) == (0, total):
                self.settle("the solver" if forced else "propagation")
                return
            first += 1 + random.randrange(max(1, 2 * (last - first) // 3))

    def settle(self, who: str) -> None:
        """No order of these actions is cheaper, so says `who`."""
        self.settled = True
        if decides(self.problem, self.orders):
            self.bound_ticks = self.cost_ticks - self.least_gain + 1
            self.notes.append(f"integer program: no schedule is cheaper, proven by {who}")

    def widest(self, first: int, pairs: int) -> tuple[int, Precedence | None]:
        """The end of the widest window from `first` with at most `pairs` open pairs, and what is forced in it."""
        target = self.cost_ticks - self.least_gain
        most = min(len(self.timed.codes) - first, MOST_ACTIONS)
        size, best = min(most, 2 * len(self.orders)), None
        while True:
            forced = forced_precedence(open_window(self.timed, first, first + size), target, self.limits)
            if best is not None and forced is not None and len(forced.open_pairs()) > pairs:
                return best
            best = first + size, forced
            if size == most or not self.running():
                return best
            size = min(most, 1 + size * 5 // 4)

    def improve(self, first: int, last: int, forced: Precedence, limit_s: float) -> bool:
        """Look for a cheaper order in a window and take it. True if the solver says that there is none."""
        target = self.cost_ticks - self.least_gain
        program = formulate(forced, max(self.bound_ticks, forced.window.floor_ticks), target, self.limits)
        try:
            answer = self.solve(program, min(limit_s, self.deadline_s - perf_counter()))
        except SolverFailed as failure:
            self.failures += 1
            self.notes.append(f"integer program: {failure}")
            return False
        if answer.values is None:
            self.failures = 0
            return answer.infeasible
        rows = forced.window.in_order(starts_of(forced, answer.values))
        orders = replaced(self.timed, first, last, rows)
        listed = evaluated(self.problem, orders, self.limits)
        if listed is None or listed.cost >= self.cost_ticks:
            self.failures += 1
            self.notes.append(
                "integer program: the solver's order does not keep what its objective promises; not taken"
            )
            return False
        self.failures = 0
        self.take(TimedOrders.of(self.problem, orders))
        self.notes.append(f"integer program: {self.problem.seconds(listed.cost):g}")
        return False


def refine_search(search: OrderSearch, deadline_s: float) -> None:
    """Integer programs improve a search that did not meet its bound, until `deadline_s`."""
    if search.best is None or search.cost <= search.target:
        return
    if not solvers():
        search.notes.append("integer program: not tried; it needs python-mip: pip install mip")
        return
    problem = search.problem
    orders = tuple(tuple(unfuse(problem, order)) for order in search.best.orders)
    apart = evaluated(problem, orders, search.units)
    if apart is None or apart.cost > search.cost:
        orders = search.best.orders
    work = Refinement(problem, orders, search.units, search.target, deadline_s, search.seed)
    work.run()
    search.notes += work.notes
    search.offer(Listed(work.cost_ticks, work.orders), "integer programs")
    certificate = search.certificate
    if work.bound_ticks > search.target:
        certificate.arguments["integer program"] = work.bound_ticks * certificate.ticks_per_s // problem.ticks_per_s
    certificate.raise_towards(Fraction(search.cost, problem.ticks_per_s), deadline_s)


@dataclass(frozen=True)
class Optimum:
    """What one program for the whole problem found; `proven` says that the solver calls it optimal."""

    orders: tuple[tuple[int, ...], ...]
    cost_ticks: int
    proven: bool
    seconds: float


def optimum(
    problem: Instance,
    orders: Sequence[Sequence[int]],
    limits: Sequence[int] | None,
    bound_ticks: int,
    limit_s: float,
    solve: Solve = solve_with_any,
) -> Optimum:
    """The whole problem as one program, started from `orders` and bounded from below: an oracle for small cases. Raises
    SolverFailed if the solver gives no usable answer, or an order that is not what it promises."""
    timed = TimedOrders.of(problem, orders)
    cost = max(timed.spans_ticks)
    if cost <= bound_ticks:
        return Optimum(timed.orders, cost, True, 0.0)
    forced = forced_precedence(open_window(timed, 0, len(timed.codes)), cost, limits)
    if forced is None:
        raise SolverFailed("the given orders break the memory limit; start from orders that keep it")
    answer = solve(formulate(forced, bound_ticks, cost, limits), limit_s)
    if answer.values is None:
        raise SolverFailed("the solver found nothing although it was given a solution")
    found = forced.window.in_order(starts_of(forced, answer.values))
    listed = evaluated(problem, found, limits)
    if listed is None or listed.cost > cost:
        raise SolverFailed("the solver's order does not keep what its objective promises")
    return Optimum(listed.orders, listed.cost, answer.optimal, answer.seconds)


def decides(problem: Instance, orders: Sequence[Sequence[int]]) -> bool:
    """Whether the best order of these actions is the best of all schedules, if each rank begins when it does. It is if
    no backward is fused or better fused, and each rank begins with F0 of its first stage: in every schedule that starts
    at the same time."""
    count, p, ticks = problem.stage_count, problem.rank_count, problem.ticks
    stages = range(count)
    fused = any(code >= BW * count * problem.microbatches for order in orders for code in order)
    never_fused = all(
        ticks[BW * count + s] >= ticks[B * count + s] + ticks[W * count + s] and problem.grows[B * count + s] <= 0
        for s in stages
    )
    chained = all(any(source == s - 1 for source, _ in problem.sources[s]) for s in stages[1:])
    return not fused and never_fused and chained and len(set(problem.placement[:p])) == p


def replaced(timed: TimedOrders, first: int, last: int, rows: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The orders with the actions of a window in a new order, `rows[rank]`."""
    free = set(timed.by_start[first:last])
    codes, streams = iter(enumerate(timed.codes)), [iter(row) for row in rows]
    return [
        tuple(next(stream) if number in free else code for number, code in (next(codes) for _ in order))
        for order, stream in zip(timed.orders, streams, strict=True)
    ]
