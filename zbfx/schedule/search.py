"""Closed forms, list scheduling, local search: the best orders found until the bound is met or the time is up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from time import perf_counter

from zbfx.plan import CostTable, Number
from zbfx.schedule.certificate import Certificate
from zbfx.schedule.exact import BW, B, Instance, W, instance
from zbfx.schedule.handmade import Ranks
from zbfx.schedule.listing import Listed, ListScheduler
from zbfx.schedule.local_search import LocalSearch
from zbfx.schedule.longest_path import iteration_ticks, peak_units, run
from zbfx.schedule.rules import RuleSearch, first_rules, most_in_flight

FIRST_STEPS, STEPS_GROWTH = 40, 1.5  # list schedules, and moves of the local search, per round


@dataclass(frozen=True)
class Found:
    """The best orders, what they cost, a lower bound on any schedule's cost, and how they were found."""

    ranks: Ranks
    cost_s: Fraction
    bound_s: Fraction
    notes: tuple[str, ...]


@dataclass
class Search:
    """One problem, the best schedule so far and its certificate."""

    costs: CostTable
    microbatches: int
    limits: Sequence[Number] | None
    seed: int
    deadline_s: float  # a reading of perf_counter
    notes: list[str] = field(default_factory=list)
    best: Listed | None = None

    def __post_init__(self) -> None:
        self.problem: Instance = instance(self.costs, self.microbatches)
        self.units = self.problem.units(self.limits)
        self.certificate = Certificate(self.costs, self.microbatches, self.limits)

    @property
    def cost(self) -> int:
        assert self.best is not None
        return self.best.cost

    @property
    def target(self) -> int:
        """The least whole number of ticks that the bound allows."""
        return -int(-self.certificate.seconds * self.problem.ticks_per_s // 1)

    def running(self) -> bool:
        return perf_counter() < self.deadline_s and (self.best is None or self.best.cost > self.target)

    def offer(self, listed: Listed | None, how: str) -> bool:
        if listed is None or (self.best is not None and listed.cost >= self.best.cost):
            return False
        self.best = listed
        self.notes.append(f"{how}: {self.problem.seconds(listed.cost):g} s")
        return True

    def compare(self, name: str, ranks: Ranks) -> str:
        """Take a generated order, and the same with every BW split, if it fits; say in one line how it does."""
        orders = self.problem.encode(ranks)
        apart = [split(self.problem, order) for order in orders]
        lines = [self._offer_orders(name, orders)]
        if apart != orders:
            self._offer_orders(f"{name}, split", apart)
        return lines[0]

    def _offer_orders(self, name: str, orders: list[list[int]]) -> str:
        result = run(self.problem, orders)
        if not result.complete:
            return f"{name}: deadlocks"
        cost = iteration_ticks(self.problem, orders, result.starts)
        peaks = [peak_units(self.problem, order) for order in orders]
        fits = self.units is None or all(peak <= limit for peak, limit in zip(peaks, self.units, strict=True))
        if fits:
            self.offer(Listed(cost, tuple(map(tuple, orders))), name)
        peak = max(self.problem.bytes(peak + static) for peak, static in zip(peaks, self.problem.static, strict=True))
        return f"{name}: {self.problem.seconds(cost):g} s, {peak:g} bytes{'' if fits else ', over the limit'}"

    def run(self) -> None:
        """The grid of rules, then by turns random changes to the best rule and local search, in rounds that grow.

        Rounds are counted in steps, not seconds, so the way is the same for a seed and only its end depends on the time.
        """
        scheduler = ListScheduler(self.problem, self.units)
        rules = RuleSearch(scheduler, most_in_flight(self.problem, self.units), self.seed)
        for rule in first_rules(self.problem, self.units, self.certificate.warm_up):
            if not self.running():
                break
            self.offer(rules.try_first(rule, self.best), "list scheduling")
        self.raise_bound()
        local = LocalSearch(self.problem, self.units, self.seed)
        steps = FIRST_STEPS
        while self.best is not None and self.running():
            before = self.best.cost
            self.offer(rules.improve(self.best, self.target, self.deadline_s, steps), "varied list scheduling")
            if self.running():
                start = Listed(self.best.cost, tuple(tuple(split(self.problem, order)) for order in self.best.orders))
                self.offer(local.improve(start, self.target, self.deadline_s, steps), "local search")
            if self.best.cost < before:
                self.raise_bound()
            steps = int(steps * STEPS_GROWTH)

    def raise_bound(self) -> None:
        if self.running():
            now = perf_counter()
            cost = Fraction(self.cost, self.problem.ticks_per_s)
            self.certificate.raise_towards(cost, now + 0.2 * (self.deadline_s - now))

    def result(self) -> Found:
        assert self.best is not None
        cost = Fraction(self.best.cost, self.problem.ticks_per_s)
        proven = self.best.cost <= self.target
        why = "the bound is met: proven optimal" if proven else "time is up"
        self.notes.append(f"{why}; the bound is {float(self.certificate.seconds):g} s ({self.certificate.argument})")
        return Found(
            self.problem.decode(self.best.orders), cost, cost if proven else self.certificate.seconds, tuple(self.notes)
        )


def split(problem: Instance, order: Sequence[int]) -> list[int]:
    """Every BW as B and W back to back."""
    count, m = problem.stage_count, problem.microbatches
    codes = []
    for code in order:
        if code >= BW * count * m:
            codes += [code - (BW - B) * count * m, code - (BW - W) * count * m]
        else:
            codes.append(code)
    return codes
