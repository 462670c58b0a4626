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

from zbfx.schedule.search.fusing import evaluated
from zbfx.schedule.search.list_scheduling import Listed, ListScheduler
from zbfx.schedule.search.rules import Rule, Turn, arrival_shapes, first_rules, most_in_flight
from zbfx.timing.exact import Instance

PASS_AND_RESULT = 1.4  # how long a pass and making its result take, in passes
FIRST_OF_LARGE = 3  # rules tried before orders by hand
PATIENCES = (0, 2, 1, 3, 4)
Generate = Callable[[], Sequence[Sequence[int]]]


@dataclass
class LargeSearch:
    """`pass_s`: how long the longest pass took so far. `deadline_s`: a reading of perf_counter, by which the result is
    to be made, too."""

    problem: Instance
    limits: Sequence[int] | None
    target: int
    deadline_s: float
    best: Listed | None = None
    pass_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def fits(self) -> bool:
        """Whether a pass would end in time."""
        return perf_counter() + PASS_AND_RESULT * self.pass_s < self.deadline_s

    def has_time(self) -> bool:
        return self.best is None or (self.best.cost > self.target and self.fits())

    def expect(self, short: Instance) -> None:
        """Time a pass over the first microbatches alone, to know how long a whole one will take."""
        begun = perf_counter()
        rule = next(large_rules(short, self.limits, None))
        ListScheduler(short, self.limits).run(rule)
        self.pass_s = (perf_counter() - begun) * self.problem.microbatches / short.microbatches

    def offer(self, listed: Listed | None, how: str) -> None:
        if listed is not None and (self.best is None or listed.cost < self.best.cost):
            self.best = listed
            self.notes.append(f"{how}: {self.problem.seconds(listed.cost):g}")

    def lists(self, rules: Iterator[Rule], most: float = inf) -> None:
        """List schedules by these rules, up to `most`, while there is time."""
        scheduler = ListScheduler(self.problem, self.limits)
        tried = 0
        while tried < most and self.has_time() and (rule := next(rules, None)) is not None:
            tried += 1
            begun = perf_counter()
            self.offer(scheduler.run(rule, inf if self.best is None else self.best.cost), "list scheduling")
            self.pass_s = max(self.pass_s, perf_counter() - begun)

    def compare(self, name: str, generate: Generate) -> str:
        """Take generated orders if they fit. Say in one line what they cost, or why they were not compared. Raises what
        `generate` raises."""
        if not self.has_time():
            return f"{name}: not compared, the time or the bound is reached"
        begun = perf_counter()
        listed = evaluated(self.problem, generate(), self.limits)
        self.pass_s = max(self.pass_s, perf_counter() - begun)
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
