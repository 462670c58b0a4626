"""Random changes to what list scheduling was told; a change stays if the schedule gets no worse.

Takes   a `Rule`, or orders and patience, and the schedule that list scheduling made of them.
Gives   a schedule that costs no more.
Raises  nothing. Source: ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from random import Random
from time import perf_counter

from zbfx.schedule.search.fusing import evaluated
from zbfx.schedule.search.list_scheduling import Listed, ListScheduler
from zbfx.schedule.search.rules import PATIENCE_UNIT, Rule, Turn
from zbfx.timing.exact import BW, B, W


class Variation(ABC):
    """A schedule, what it was built from, and a way to build others nearby."""

    def __init__(self, scheduler: ListScheduler, start: Listed, seed: int) -> None:
        self.scheduler, self.best, self.random = scheduler, start, Random(seed)

    @abstractmethod
    def step(self) -> None:
        """Try one change; keep it, and the new `best`, unless the cost rises."""

    def advance(self, target: int, deadline_s: float, steps: int) -> None:
        """Take `steps` steps, or stop at cost `target` or when perf_counter reads `deadline_s`."""
        for _ in range(steps):
            if self.best.cost <= target or perf_counter() > deadline_s:
                return
            self.step()

    def times(self) -> range:
        return range(self.random.choice((1, 1, 2, 3)))


class RuleVariation(Variation):
    """Changes one to three numbers of a `Rule`. `most[s]`: the most Fs of stage s that fit in memory."""

    def __init__(self, scheduler: ListScheduler, rule: Rule, start: Listed, most: Sequence[int], seed: int) -> None:
        super().__init__(scheduler, start, seed)
        self.rule, self.most = rule, most

    def step(self) -> None:
        rule = self._varied()
        listed = self.scheduler.run(rule, self.best.cost + 1)
        if listed is not None:
            self.rule, self.best = rule, listed

    def _varied(self) -> Rule:
        rule, random = self.rule, self.random
        hold, cap, patience = list(rule.hold), list(rule.cap), list(rule.patience)
        alternate, recycle, turn = list(rule.alternate), list(rule.recycle), list(rule.turn)
        for _ in self.times():
            stage, rank = random.randrange(len(hold)), random.randrange(len(patience))
            what = random.randrange(6 if len(hold) == len(patience) else 7)
            if what == 0:
                hold[stage] = max(1, min(self.most[stage], hold[stage] + random.choice((-1, 1))))
            elif what <= 2:
                cap[stage] = max(1, min(self.most[stage], cap[stage] + random.choice((-2, -1, 1, 2))))
            elif what == 3:
                patience[rank] = random.randint(-1, PATIENCE_UNIT + 1)
            elif what == 4:
                alternate[rank] = not alternate[rank]
            elif what == 5:
                recycle[rank] = not recycle[rank]
            else:
                turn[rank] = random.choice(tuple(Turn))
        return Rule(tuple(hold), tuple(cap), tuple(patience), tuple(alternate), tuple(recycle), tuple(turn))


class RefillVariation(Variation):
    """Keeps the order of Fs and Bs and changes how patiently each rank places its Ws."""

    def __init__(
        self, scheduler: ListScheduler, orders: Sequence[Sequence[int]], patience: int, start: Listed, seed: int
    ) -> None:
        super().__init__(scheduler, start, seed)
        self.orders, self.patience = orders, [patience] * len(orders)

    def step(self) -> None:
        patience = list(self.patience)
        for _ in self.times():
            value = self.random.randint(-1, 2 * PATIENCE_UNIT)
            first = self.random.randrange(len(patience))
            last = self.random.randrange(len(patience)) if self.random.random() < 0.5 else first
            for rank in range(min(first, last), max(first, last) + 1):
                patience[rank] = value
        listed = self.scheduler.refill(self.orders, patience, self.best.cost + 1)
        if listed is not None:
            self.patience, self.best = patience, listed


class FusingVariation(Variation):
    """Fuses and splits backwards, each microbatch for itself. `stages`: where that may pay."""

    def __init__(
        self,
        scheduler: ListScheduler,
        limits: Sequence[int] | None,
        start: Listed,
        stages: Collection[int],
        seed: int,
    ) -> None:
        super().__init__(scheduler, start, seed)
        self.limits = limits
        self.places = [(stage, j) for stage in sorted(stages) for j in range(scheduler.problem.microbatches)]

    def step(self) -> None:
        orders = [list(order) for order in self.best.orders]
        for _ in self.times():
            self._toggle(orders, *self.random.choice(self.places))
        listed = evaluated(self.scheduler.problem, orders, self.limits)
        if listed is not None and listed.cost <= self.best.cost:
            self.best = listed

    def _toggle(self, orders: list[list[int]], stage: int, microbatch: int) -> None:
        """Fuse the backward where its B is, or split it and put its W somewhere behind."""
        problem = self.scheduler.problem
        whole, backward, weight = (
            (kind * problem.stage_count + stage) * problem.microbatches + microbatch for kind in (BW, B, W)
        )
        order = orders[problem.placement[stage]]
        if backward in order:
            order[order.index(backward)] = whole
            order.remove(weight)
        else:
            place = order.index(whole)
            order[place] = backward
            order.insert(
                self.random.choice((place + 1, self.random.randint(place + 1, len(order)), len(order))), weight
            )
