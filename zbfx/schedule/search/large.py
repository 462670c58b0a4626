"""Problems of many ranks or microbatches: passes of list scheduling and orders by hand, as many as there is time for.

Takes   an `Instance`, a limit per rank, a lower bound in ticks, a deadline; generated orders, made when asked for.
Gives   the best orders found, and notes. A pass begins only if it would end in time, by how long others took.
Raises  nothing. Source: section 3.1 of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from zbfx.schedule.orders.handmade import Orders
from zbfx.schedule.search.fusing import evaluated, one_by_one
from zbfx.schedule.search.list_scheduling import Listed, ListScheduler
from zbfx.schedule.search.rules import Rule, Turn, arrival_shapes, first_rules, most_in_flight
from zbfx.timing.exact import Instance, longest_paths

CHECKING = 1.6  # the result, and timing it: in passes over given orders
GENERATING = 2.0  # orders by hand, and timing them: in such passes
AS_ARRAYS = 2.0  # the same, of orders that are made as arrays: in list schedules
RULES_BETWEEN = 3  # tried before each of the orders by hand
PATIENCES = (0, 2, 1, 3, 4)
Generate = Callable[[], Orders]


@dataclass
class LargeSearch:
    """`list_s`, `orders_s`: how long the longest pass of list scheduling, and one over given orders, took so far.
    `deadline_s`: a reading of perf_counter, by which the result is to be made, too."""

    problem: Instance
    limits: Sequence[int] | None
    target: int
    deadline_s: float
    best: Listed | None = None
    list_s: float = 0.0
    orders_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = ListScheduler(self.problem, self.limits, compiled_from=0)

    def fits(self, pass_s: float) -> bool:
        """Whether a pass that takes so long would end in time."""
        return perf_counter() + pass_s < self.deadline_s

    def lists_fit(self) -> bool:
        return self.fits(self.list_s + CHECKING * self.orders_s)

    def expect(self, short: Instance) -> None:
        """Time passes over the first microbatches alone, to know how long whole ones will take. The first may compile
        what the second runs."""
        scheduler, rule = (
            ListScheduler(short, self.limits, compiled_from=0),
            next(large_rules(short, self.limits, None)),
        )
        share = self.problem.microbatches / short.microbatches
        scheduler.run(rule)
        begun = perf_counter()
        scheduler.run(rule)
        listed = perf_counter()
        longest_paths(short, one_by_one(short))
        self.list_s, self.orders_s = share * (listed - begun), share * (perf_counter() - listed)

    def offer(self, listed: Listed | None, how: str) -> None:
        if listed is not None and (self.best is None or listed.cost < self.best.cost):
            self.best = listed
            self.notes.append(f"{how}: {self.problem.seconds(listed.cost):g}")

    def open(self) -> bool:
        return self.best is None or self.best.cost > self.target

    def lists(self, rules: Iterator[Rule], most: float = inf) -> None:
        """List schedules by these rules, up to `most`, while there is time."""
        tried = 0
        while tried < most and self.open() and self.lists_fit() and (rule := next(rules, None)) is not None:
            tried += 1
            begun = perf_counter()
            self.offer(self.scheduler.run(rule, inf if self.best is None else self.best.cost), "list scheduling")
            self.list_s = max(self.list_s, perf_counter() - begun)

    def compare(self, name: str, generate: Generate, *, as_arrays: bool = False) -> str:
        """Take generated orders if they fit. Say in one line what they cost, or why they were not compared. Raises what
        `generate` raises. `as_arrays`: it makes them fast."""
        compiled = self.scheduler.compiled_rules()
        quick = as_arrays and compiled is not None
        pass_s = AS_ARRAYS * self.list_s if quick else GENERATING * self.orders_s
        if self.best is not None and not (self.open() and self.fits(pass_s + CHECKING * self.orders_s)):
            return f"{name}: not compared, the time or the bound is reached"
        begun, orders = perf_counter(), generate()
        if compiled is None:
            listed = evaluated(self.problem, self.problem.encode(orders), self.limits)
            self.orders_s = max(self.orders_s, (perf_counter() - begun) / GENERATING)
        else:
            listed = compiled.evaluate(orders)
        self.offer(listed, name)
        if listed is None:
            return f"{name}: over the limit, or it deadlocks"
        return f"{name}: iteration time {self.problem.seconds(listed.cost):g}"


def large_rules(
    problem: Instance, limits: Sequence[int] | None, warm_up: Sequence[tuple[int, int]] | None
) -> Iterator[Rule]:
    """Warm-ups by arrivals without patience first, then the grid of small problems."""
    p = problem.rank_count
    for hold, cap in arrival_shapes(problem, most_in_flight(problem, limits)):
        for patience in PATIENCES:
            yield Rule(hold, cap, (patience,) * p, (False,) * p, (False,) * p, (Turn.LATER,) * p)
    yield from first_rules(problem, limits, warm_up)
