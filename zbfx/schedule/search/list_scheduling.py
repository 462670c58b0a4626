"""List scheduling: build all orders together, event by event, with a rule that picks each rank's next action.

Takes   an `Instance`, a limit per rank, a `Rule`; or orders of Fs and Bs into which Ws are placed anew.
Gives   a `Listed`; None where the rule gets stuck or costs too much. A free rank takes, in this order: a B that has
        arrived; an F that has arrived and fits; a W that fills the gap before the next arrival well enough. Else it
        waits.
Raises  nothing. Source: section 3.1 of the paper, for any placement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from importlib.util import find_spec
from itertools import accumulate, pairwise
from math import ceil, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zbfx.plan import Action
from zbfx.schedule.search.rules import PATIENCE_UNIT, Rule, Turn
from zbfx.timing.exact import B, F, Instance, W

COMPILED_FROM = 200_000
NO_LIMIT = 1 << 61


@dataclass(frozen=True)
class Listed:
    """Coded orders and their cost in ticks."""

    cost: int
    orders: tuple[tuple[int, ...], ...]


class ListScheduler:
    """What list scheduling needs of one problem, whatever the rule. Rules run compiled, where numba is installed, once
    `compiled_from` actions have been placed: loading numba takes as long as placing some 200,000."""

    def __init__(self, problem: Instance, limits: Sequence[int] | None, compiled_from: int = COMPILED_FROM) -> None:
        self.problem, self.compiled_from, self.actions_run = problem, compiled_from, 0
        self._compiled: CompiledRules | None = None
        count, ranks = problem.stage_count, range(problem.rank_count)
        self.limits: list[float] = [inf] * problem.rank_count if limits is None else list(limits)
        # Later stages first, as their Bs gate every earlier stage's, and their Fs lead to the next Bs.
        self.stages = [[s for s in reversed(range(count)) if problem.placement[s] == rank] for rank in ranks]
        self.work = [
            problem.microbatches * sum(problem.ticks[kind * count + s] for s in self.stages[rank] for kind in (F, B, W))
            for rank in ranks
        ]
        # An F must leave room for the later stages of its rank, as no B comes back before they have run, and for what
        # that B adds where M_W exceeds M_B.
        grows = problem.grows
        self.room = [
            grows[s]
            + sum(grows[later] for later in self.stages[problem.placement[s]] if later > s)
            + max(0, max(grows[count + other] for other in self.stages[problem.placement[s]]))
            for s in range(count)
        ]
        self.receivers: list[list[tuple[int, int]]] = [[] for _ in range(2 * count)]  # (rank, lag) per producing group
        for group in range(2 * count):
            for source, lag in problem.sources[group]:
                rank = problem.placement[group % count]
                if rank != problem.placement[source % count]:
                    self.receivers[source].append((rank, lag))

    def run(self, rule: Rule, stop_at: float = inf) -> Listed | None:
        """The rule's schedule, or None if it gets stuck or costs `stop_at` ticks or more."""
        self.actions_run += 3 * self.problem.stage_count * self.problem.microbatches
        compiled = self.compiled_rules()
        return _ByRule(self, rule).finish(stop_at) if compiled is None else compiled.run(rule, stop_at)

    def compiled_rules(self) -> CompiledRules | None:
        """None where numba is missing, or nothing worth loading it has been placed."""
        if self._compiled is None and self.actions_run >= self.compiled_from and compilable(self.problem):
            self._compiled = CompiledRules(self)
        return self._compiled

    def refill(self, orders: Sequence[Sequence[int]], patience: Sequence[int], stop_at: float = inf) -> Listed | None:
        """Keep every rank's order of Fs and Bs and place the Ws anew: in gaps that they fill well enough, and where
        the next F or B needs their memory."""
        return _ByOrder(self, orders, patience).finish(stop_at)

    def squeeze(self, orders: Sequence[Sequence[int]], stop_at: float = inf) -> Listed | None:
        """Every rank runs the first action of its order that can start, whenever it is free."""
        return _Squeezed(self, orders).finish(stop_at)


def compilable(problem: Instance) -> bool:
    """Whether numba is installed and times fit into its whole numbers, multiplied by the number of ranks."""
    longest = problem.microbatches * (sum(problem.ticks) + sum(lag for needed in problem.sources for _, lag in needed))
    return longest * problem.rank_count < NO_LIMIT and find_spec("numba") is not None


class CompiledRules:
    """The rules of one problem as numba runs them; the same schedules as `_ByRule` makes."""

    def __init__(self, scheduler: ListScheduler) -> None:
        from zbfx.schedule.search.listing_loop import orders_timed, rule_listed  # need numba, .3 s to import

        problem, limits = scheduler.problem, scheduler.limits
        self.problem, self.listed, self.timed = problem, rule_listed, orders_timed
        self.lists = (
            problem.microbatches,
            whole_numbers(problem.ticks),
            whole_numbers(problem.grows),
            whole_numbers(scheduler.room),
            whole_numbers([NO_LIMIT if limit == inf else limit for limit in limits]),
            whole_numbers(scheduler.work),
            *_flat([[(stage,) for stage in stages] for stages in scheduler.stages], 1),
            *_flat(problem.sources, 2),
            *_flat(scheduler.receivers, 2),
        )

    def run(self, rule: Rule, stop_at: float) -> Listed | None:
        problem = self.problem
        most = max(map(problem.placement.count, range(problem.rank_count)))
        orders = np.empty((problem.rank_count, 3 * most * problem.microbatches), np.int64)
        lengths = np.zeros(problem.rank_count, np.int64)
        choices = (
            whole_numbers(rule.hold),
            whole_numbers(rule.cap),
            whole_numbers(rule.patience),
            whole_numbers(rule.alternate),
            whole_numbers(rule.recycle),
            whole_numbers([turn.value for turn in rule.turn]),
        )
        stop = NO_LIMIT if stop_at == inf else ceil(stop_at)
        cost = self.listed(self.lists, choices, stop, orders, lengths)
        if cost < 0:
            return None
        return Listed(cost, tuple(tuple(row[:length].tolist()) for row, length in zip(orders, lengths, strict=True)))

    def evaluate(self, orders: Sequence[Sequence[Action]]) -> Listed | None:
        """The orders with their cost, or None if they deadlock or exceed the limits."""
        views = [order for order in orders if self.problem.has_coded(order)]
        rows = [view.codes for view in views] if len(views) == len(orders) else self.problem.encode(orders)
        begins = whole_numbers([0, *accumulate(map(len, rows))])
        codes = np.concatenate([whole_numbers(row) for row in rows])
        cost = self.timed(self.lists, codes, begins)
        if cost < 0:
            return None
        return Listed(cost, tuple(tuple(codes[low:high].tolist()) for low, high in pairwise(begins)))


def whole_numbers(values: Sequence[float] | NDArray[Any]) -> Any:
    """An array for numba."""
    return np.array(values, dtype=np.int64)


def _flat(rows: Sequence[Sequence[tuple[int, ...]]], columns: int) -> list[Any]:
    """Where each row begins, and the end of the last; then all entries, a list for each column."""
    starts = [0, *accumulate(map(len, rows))]
    entries = [entry for row in rows for entry in row]
    return [whole_numbers(starts), *(whole_numbers([entry[column] for entry in entries]) for column in range(columns))]


class _Listing(ABC):
    """Orders while they are built. Subclasses choose each rank's next action."""

    def __init__(self, scheduler: ListScheduler) -> None:
        problem = scheduler.problem
        self.scheduler, self.problem = scheduler, problem
        self.ends: list[list[int]] = [[] for _ in range(3 * problem.stage_count)]  # per group, in order of microbatches
        self.held = [0] * problem.rank_count
        self.last_kind = [F] * problem.rank_count
        self.orders: list[list[int]] = [[] for _ in range(problem.rank_count)]

    def arrival(self, group: int, microbatch: int) -> float:
        """When the inputs of an action are there, as far as known; inf if one is not even scheduled."""
        latest = 0
        for source, lag in self.problem.sources[group]:
            ends = self.ends[source]
            if microbatch >= len(ends):
                return inf
            if ends[microbatch] + lag > latest:
                latest = ends[microbatch] + lag
        return latest

    @abstractmethod
    def choose(self, rank: int, now: int) -> int:
        """The group that `rank` runs next, or -1 to wait."""

    def finish(self, stop_at: float) -> Listed | None:
        problem, scheduler = self.problem, self.scheduler
        count, m = problem.stage_count, problem.microbatches
        clocks = [0] * problem.rank_count
        first: list[int | None] = [None] * problem.rank_count
        spare = [stop_at - work for work in scheduler.work]  # idle ticks before the rank alone costs stop_at
        events = [(0, rank) for rank in range(problem.rank_count)]
        while events:
            now, rank = heappop(events)
            if clocks[rank] > now:
                continue
            group = self.choose(rank, now)
            if group < 0:
                continue
            if first[rank] is None:
                first[rank] = now
            else:
                spare[rank] -= now - clocks[rank]
            if spare[rank] <= 0:
                return None
            end = now + problem.ticks[group]
            clocks[rank] = end
            self.orders[rank].append(group * m + len(self.ends[group]))
            self.ends[group].append(end)
            self.held[rank] += problem.grows[group]
            if group < 2 * count:
                self.last_kind[rank] = group // count
                for receiver, lag in scheduler.receivers[group]:
                    heappush(events, (end + lag, receiver))
            heappush(events, (end, rank))
        if any(len(ends) < m for ends in self.ends):
            return None
        cost = max(clock - (begun or 0) for clock, begun in zip(clocks, first, strict=True))
        return Listed(cost, tuple(map(tuple, self.orders)))


class _ByRule(_Listing):
    def __init__(self, scheduler: ListScheduler, rule: Rule) -> None:
        super().__init__(scheduler)
        self.rule = rule

    def choose(self, rank: int, now: int) -> int:
        problem, rule, scheduler, ends = self.problem, self.rule, self.scheduler, self.ends
        count, m = problem.stage_count, problem.microbatches
        allowed = scheduler.limits[rank] - self.held[rank]
        earlier, fewest = rule.turn[rank] is Turn.EARLIER, rule.turn[rank] is Turn.FEWEST
        grouped, p = rule.turn[rank] is Turn.GROUPED, problem.rank_count
        next_arrival = inf
        forward = backward = weight = -1
        finished, blocked = True, False
        for stage in scheduler.stages[rank]:
            started, returned, done = len(ends[stage]), len(ends[count + stage]), len(ends[2 * count + stage])
            if returned < m:
                finished = False
                grown = problem.grows[count + stage]
                if started > returned and started >= rule.hold[stage] and grown <= allowed:
                    at = self.arrival(count + stage, returned)
                    if at <= now:
                        if (
                            backward < 0
                            or earlier
                            or (fewest and returned < len(ends[backward]))
                            or (grouped and returned // p < len(ends[backward]) // p)
                        ):
                            backward = count + stage
                    elif at < next_arrival:
                        next_arrival = at
                if started < m and (started - returned < rule.cap[stage] or started < rule.hold[stage]):
                    at = self.arrival(stage, started)
                    if scheduler.room[stage] > allowed:
                        blocked = blocked or at <= now
                    elif at <= now:
                        if (
                            forward < 0
                            or earlier
                            or (fewest and started < len(ends[forward]))
                            or (grouped and started // p <= len(ends[forward]) // p)
                        ):
                            forward = stage
                    elif at < next_arrival:
                        next_arrival = at
            if done < returned and weight < 0:
                weight = 2 * count + stage
        if blocked and forward < 0 and weight >= 0 and rule.recycle[rank]:
            return weight
        if backward >= 0 and not (forward >= 0 and rule.alternate[rank] and self.last_kind[rank] == B):
            return backward
        if forward >= 0:
            return forward
        if weight >= 0 and (
            finished or PATIENCE_UNIT * (next_arrival - now) >= rule.patience[rank] * problem.ticks[weight]
        ):
            return weight
        return -1


class _ByOrder(_Listing):
    def __init__(self, scheduler: ListScheduler, orders: Sequence[Sequence[int]], patience: Sequence[int]) -> None:
        super().__init__(scheduler)
        m, weights = self.problem.microbatches, 2 * self.problem.stage_count
        self.fixed = [[code // m for code in order if code // m < weights] for order in orders]
        self.next = [0] * len(orders)
        self.patience = patience

    def choose(self, rank: int, now: int) -> int:
        problem, ends, fixed = self.problem, self.ends, self.fixed[rank]
        count = problem.stage_count
        pending = [s for s in self.scheduler.stages[rank] if len(ends[2 * count + s]) < len(ends[count + s])]
        weight = 2 * count + pending[0] if pending else -1
        if self.next[rank] == len(fixed):
            return weight
        group = fixed[self.next[rank]]
        if self.held[rank] + problem.grows[group] > self.scheduler.limits[rank]:
            return weight
        at = self.arrival(group, len(ends[group]))
        if at <= now:
            self.next[rank] += 1
            return group
        return weight if PATIENCE_UNIT * (at - now) >= self.patience[rank] * problem.ticks[weight] else -1


class _Squeezed(_Listing):
    """`left[rank]`: the groups of the actions that the rank has not run, in their order."""

    def __init__(self, scheduler: ListScheduler, orders: Sequence[Sequence[int]]) -> None:
        super().__init__(scheduler)
        self.left = [[code // self.problem.microbatches for code in reversed(order)] for order in orders]
        self.kinds = [len(set(groups)) for groups in self.left]

    def choose(self, rank: int, now: int) -> int:
        """An action may go before others where the limit still holds while these run."""
        left, grows = self.left[rank], self.problem.grows
        seen: set[int] = set()
        passed = peak = 0  # what the actions before it add, and the most of it
        for place in range(len(left) - 1, -1, -1):
            group = left[place]
            if group not in seen:
                seen.add(group)
                most = self.held[rank] + grows[group] + peak
                if most <= self.scheduler.limits[rank] and self.arrival(group, len(self.ends[group])) <= now:
                    del left[place]
                    return group
                if len(seen) == self.kinds[rank]:
                    return -1
            passed += grows[group]
            peak = max(peak, passed)
        return -1
