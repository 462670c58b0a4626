"""Generated orders, list scheduling, local search: the best orders found until the bound is met or the time is up.

Takes   a cost table, a number of microbatches, a limit per rank, a seed, a deadline.
Gives   a `Found`: orders, cost, lower bound, notes.
Raises  nothing. Source: section 3 of the paper. The paper's heuristic is one of the starting points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from math import ceil, inf
from time import perf_counter

from zbfx.plan import CostTable, Number
from zbfx.schedule.bounds.certificate import Certificate
from zbfx.schedule.orders.handmade import Orders
from zbfx.schedule.orders.vshape import v_placement, zb_v
from zbfx.schedule.search.annealing import Annealing, available
from zbfx.schedule.search.fusing import (
    evaluated,
    fuse,
    fuse_where_it_pays,
    fused_costs,
    one_by_one,
    savings,
    split_last,
    unfuse,
)
from zbfx.schedule.search.list_scheduling import Listed, ListScheduler
from zbfx.schedule.search.local_search import LocalSearch
from zbfx.schedule.search.rounds import in_rounds
from zbfx.schedule.search.rules import PATIENCE_UNIT, Rule, first_rules, most_in_flight
from zbfx.schedule.search.variation import FusingVariation, RefillVariation, RuleVariation, Variation
from zbfx.timing.exact import Instance, instance, peak_units

FIRST_STEPS, STEPS_GROWTH = 40, 1.5  # list schedules, and moves of the local search, per contender and round
ANNEALED_GROWTH = 3.0  # instead: one long way from hot to cold finds more than many short ones
ANNEALING_STEPS = 1000  # for one of those
LISTED_STEPS = 8  # one list schedule for so many of those, where orders are annealed
BOUND_SHARE = 0.15  # of the time left, whenever the bound is raised
ANNEALING_S = 0.5  # less is not worth starting to anneal
RULE_CONTENDERS, REFILL_CONTENDERS = 3, 3  # schedules from which search goes on
SPLIT_SHARES = (1, 2, 3, 4)  # of rank i's last backwards, times i
FUSED_SHARE = 0.4  # of the time, for schedules whose cheaper fused backwards stay whole
GRID_SHARE = 0.2  # of the time, at most, for the grid of rules
EXTRA_WARM_UPS = (1, 2, 3, 5)  # Fs added to the warm-up of the paper's V order
LEADING = 4  # rules tried before anything else
REFILL_PATIENCES = (PATIENCE_UNIT - 1, PATIENCE_UNIT // 2, 1, 0)


@dataclass(frozen=True)
class Found:
    """The best orders, what they cost, a lower bound on any schedule's cost, and how they were found."""

    ranks: Orders
    cost_s: Fraction
    bound_s: Fraction
    notes: tuple[str, ...]


@dataclass
class Contender:
    """One schedule that search goes on from: a variation of it, and local search from the best of both."""

    variation: Variation
    local: LocalSearch | Annealing | None
    how: str
    steps_per_step: int = 1
    polished: Listed | None = None

    @property
    def best(self) -> Listed:
        found = self.variation.best
        return found if self.polished is None or found.cost < self.polished.cost else self.polished

    def advance(self, target: int, deadline_s: float, steps: int) -> None:
        self.variation.advance(target, deadline_s, steps if self.steps_per_step == 1 else steps // LISTED_STEPS)
        if self.local is not None:
            self.polished = self.local.improve(self.best, target, deadline_s, steps * self.steps_per_step)


@dataclass
class OrderSearch:
    """One problem, the best schedule so far and its certificate."""

    costs: CostTable
    microbatches: int
    limits: Sequence[Number] | None
    seed: int
    deadline_s: float  # a reading of perf_counter
    rounds: int | None = None  # of local search; None: until the time is up
    notes: list[str] = field(default_factory=list)
    best: Listed | None = None
    whole: Listed | None = None  # the best whose backwards are fused, stage by stage
    generated: list[tuple[str, list[list[int]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.problem: Instance = instance(self.costs, self.microbatches)
        self.units = self.problem.units(self.limits)
        self.certificate = Certificate(self.costs, self.microbatches, self.limits)
        self.scheduler = ListScheduler(self.problem, self.units)
        # On plain linear pipelines tabu search and integer programs prove most schedules optimal.
        folded = self.problem.stage_count > self.problem.rank_count
        fusing = any(saved > 0 for saved in savings(self.problem).values())
        in_time = self.deadline_s - perf_counter() > ANNEALING_S
        self.anneals = (folded or fusing) and in_time and available(self.problem)

    @property
    def cost(self) -> int:
        assert self.best is not None
        return self.best.cost

    @property
    def target(self) -> int:
        """What a schedule may cost, in ticks, that counts as optimal."""
        return ceil(self.certificate.seconds * self.problem.ticks_per_s * (1 + self.certificate.slack))

    def running(self) -> bool:
        return perf_counter() < self.deadline_s and (self.best is None or self.best.cost > self.target)

    def offer(self, listed: Listed | None, how: str) -> bool:
        if listed is None or (self.best is not None and listed.cost >= self.best.cost):
            return False
        self.best = listed
        self.notes.append(f"{how}: {self.problem.seconds(listed.cost):g}")
        return True

    def lead(self) -> None:
        """Try the rules that are most likely to meet the bound at once, and rounds on a V."""
        if self.running() and self.costs.placement == v_placement(self.problem.rank_count):
            listed = in_rounds(self.problem, self.units, self.deadline_s)
            self.offer(listed, "rounds")
            if listed is not None:
                self.generated.append(("rounds", [list(order) for order in listed.orders]))
        rules = first_rules(self.problem, self.units, self.certificate.warm_up)
        for rule in islice(rules, LEADING):
            if self.running():
                self.offer(self.scheduler.run(rule), "list scheduling")

    def compare(self, name: str, ranks: Orders) -> str:
        """Take generated orders if they fit. Keep them, to place their Ws anew. Say in one line what they cost."""
        orders = self.problem.encode(ranks)
        peaks = [peak_units(self.problem, order) for order in orders]
        listed = evaluated(self.problem, orders, None)
        if listed is None:
            return f"{name}: deadlocks"
        fits = self.units is None or all(peak <= limit for peak, limit in zip(peaks, self.units, strict=True))
        if fits:
            self.offer(listed, name)
        self.generated.append((name, [unfuse(self.problem, order) for order in orders]))
        peak = max(self.problem.bytes(peak + static) for peak, static in zip(peaks, self.problem.static, strict=True))
        over = "" if fits else ", over the limit"
        return f"{name}: iteration time {self.problem.seconds(listed.cost):g}, peak memory {peak:g}{over}"

    def run(self) -> None:
        """The grids, then rounds: each contender varies and polishes its schedule, and the better half goes on. Rounds
        are counted in steps, not seconds: a seed fixes the way, and time only its end."""
        contenders = [*self._rules(), *self._refills(), *self._fused()]
        if self.best is None:
            self.offer(evaluated(self.problem, self.one_by_one(), self.units), "one microbatch after the other")
        self.raise_bound()
        contenders.sort(key=lambda contender: contender.best.cost)
        steps = FIRST_STEPS
        ended = 0
        while contenders and self.running() and ended != self.rounds:
            ended += 1
            before = self.cost
            for contender in contenders:
                if self.running():
                    contender.advance(self.target, self.deadline_s, steps)
                    self.offer(contender.best, contender.how)
            if self.cost < before:
                self.raise_bound()
            contenders = sorted(contenders, key=lambda contender: contender.best.cost)[: max(2, len(contenders) // 2)]
            steps = int(steps * (ANNEALED_GROWTH if self.anneals else STEPS_GROWTH))

    def one_by_one(self) -> list[list[int]]:
        """The order that needs least memory."""
        return one_by_one(self.problem)

    def _contender(self, variation: Variation, how: str) -> Contender:
        if self.anneals:
            annealing = Annealing(self.problem, self.units, self.seed)
            return Contender(variation, annealing, f"{how} and annealing", ANNEALING_STEPS)
        return Contender(variation, LocalSearch(self.problem, self.units, self.seed), f"{how} and local search")

    def _refills(self) -> list[Contender]:
        """The generated orders with their Ws placed anew."""
        best: list[tuple[int, str, list[list[int]], int, Listed]] = []
        if self.costs.placement == v_placement(self.problem.rank_count):
            for extra in EXTRA_WARM_UPS:
                orders = self.problem.encode(zb_v(self.costs, self.microbatches, extra))
                self.generated.append((f"zb-v-order with {extra} more Fs", orders))
        for name, orders in self.generated:
            found = []
            for patience in REFILL_PATIENCES:
                if self.running():
                    listed = self.scheduler.refill(orders, [patience] * len(orders))
                    if listed is not None:
                        self.offer(listed, f"{name}, Ws placed anew")
                        found.append((listed.cost, patience, listed))
            if found:
                cost, patience, listed = min(found, key=lambda entry: entry[0])
                best.append((cost, name, orders, patience, listed))
        best.sort(key=lambda entry: entry[0])
        return [
            self._contender(RefillVariation(self.scheduler, orders, patience, listed, self.seed), f"{name} varied")
            for _, name, orders, patience, listed in best[:REFILL_CONTENDERS]
        ]

    def _rules(self) -> list[Contender]:
        """The best few of the grid of list-scheduling rules."""
        until = perf_counter() + GRID_SHARE * (self.deadline_s - perf_counter())
        kept: list[tuple[Listed, Rule]] = []
        for rule in first_rules(self.problem, self.units, self.certificate.warm_up):
            if not self.running() or (kept and perf_counter() > until):
                break
            listed = self.scheduler.run(rule, kept[-1][0].cost if len(kept) == RULE_CONTENDERS else inf)
            if listed is not None and all(listed.cost != other.cost for other, _ in kept):
                self.offer(listed, "list scheduling")
                kept = sorted([*kept, (listed, rule)], key=lambda entry: entry[0].cost)[:RULE_CONTENDERS]
        most = most_in_flight(self.problem, self.units)
        return [
            self._contender(RuleVariation(self.scheduler, rule, listed, most, self.seed), "list scheduling varied")
            for listed, rule in kept
        ]

    def _fused(self) -> list[Contender]:
        """The best schedule with each backward fused or split for itself, also with the last of each rank split."""
        stages = [stage for stage, saved in savings(self.problem).items() if saved > 0]
        starts = [listed for listed in (self.whole, self.best) if listed is not None]
        if not stages or not starts:
            return []
        orders = [split_last(self.problem, listed.orders, share) for listed in starts for share in SPLIT_SHARES]
        starts += [listed for listed in (evaluated(self.problem, o, self.units) for o in orders) if listed is not None]
        start = min(starts, key=lambda listed: listed.cost)
        self.offer(start, "last backwards split")
        variation = FusingVariation(self.scheduler, self.units, start, stages, self.seed)
        if not self.anneals:  # tabu search knows no fused backwards
            return [Contender(variation, None, "backwards fused one by one")]
        return [self._contender(variation, "backwards fused one by one")]

    def try_fused(self) -> None:
        """Search as if stages had only BW, wherever BW takes less time or memory than B and W apart."""
        count = self.problem.stage_count
        stages = [s for s, saved in savings(self.problem).items() if saved > 0 or self.problem.grows[count + s] > 0]
        if not stages:
            return
        until = perf_counter() + FUSED_SHARE * (self.deadline_s - perf_counter())
        costs = fused_costs(self.costs, stages)
        other = OrderSearch(costs, self.microbatches, self.limits, self.seed, until, self.rounds)
        other.lead()
        other.run()
        if other.best is not None:
            orders = fuse(self.problem, [unfuse(self.problem, order) for order in other.best.orders], stages)
            self.whole = evaluated(self.problem, orders, self.units)
            self.offer(self.whole, "backwards fused")

    def fuse(self) -> None:
        """Run B and W as one where that takes no longer."""
        if self.best is not None:
            self.best, stages = fuse_where_it_pays(self.problem, self.best, self.units)
            if stages:
                self.notes.append(f"not split, as BW takes no longer: stages {', '.join(map(str, stages))}")

    def raise_bound(self) -> None:
        if self.running():
            now = perf_counter()
            cost = Fraction(self.cost, self.problem.ticks_per_s)
            self.certificate.raise_towards(cost, now + BOUND_SHARE * (self.deadline_s - now))

    def result(self) -> Found:
        assert self.best is not None
        cost = Fraction(self.best.cost, self.problem.ticks_per_s)
        proven = self.best.cost <= self.target
        why = "the bound is met: proven optimal" if proven else "time is up"
        self.notes.append(f"{why}; the bound is {float(self.certificate.seconds):g} ({self.certificate.argument})")
        return Found(
            self.problem.decode(self.best.orders), cost, cost if proven else self.certificate.seconds, tuple(self.notes)
        )
