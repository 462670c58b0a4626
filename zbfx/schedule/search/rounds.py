"""Schedules of a V in rounds: in each round every rank runs a B and an F, and Ws where the rank would wait.

Takes   an `Instance` with a V placement, a limit per rank.
Gives   a `Listed`; None where the rounds get stuck.
Raises  nothing.
Source  the greedy of ZB-V: section 6 of the paper, and the schedule that its authors publish. Here stages may differ.

A W fills a wait that is at least as long. It also comes before a shorter one, if the rank would otherwise have waited
longer than the rank that waits most. Passes follow one another: a rank that waited little in one may wait more in the
next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from math import inf
from time import perf_counter

from zbfx.schedule.search.list_scheduling import Listed
from zbfx.timing.exact import B, F, Instance, W, iteration_ticks, longest_paths

MOST_PASSES = 8


class Stuck(Exception):
    """The next action of a round lacks memory, or what it needs has not been scheduled."""


def in_rounds(problem: Instance, limits: Sequence[int] | None, deadline_s: float) -> Listed | None:
    """The best of all passes that begin before `deadline_s`, a reading of perf_counter."""
    best: Listed | None = None
    for before_b, before_f in product((True, False), (False, True)):
        waited: list[int] | None = None
        for _ in range(MOST_PASSES):
            if perf_counter() > deadline_s:
                return best
            rounds = Rounds(problem, limits, waited, before_f=before_f, before_b=before_b)
            try:
                rounds.run()
            except Stuck:
                break
            cost = iteration_ticks(problem, rounds.orders, longest_paths(problem, rounds.orders).starts)
            if best is None or cost < best.cost:
                best = Listed(cost, tuple(map(tuple, rounds.orders)))
            if waited is not None and max(rounds.waited) >= max(waited):
                break
            waited = rounds.waited
    return best


class Rounds:
    """One pass. `waited`: per rank how long it has been idle since its first action; `known` the same of the pass
    before. `before_f`, `before_b`: Ws also come before an F, a B that the rank would not wait long for."""

    def __init__(
        self,
        problem: Instance,
        limits: Sequence[int] | None,
        known: Sequence[int] | None,
        *,
        before_f: bool,
        before_b: bool,
    ) -> None:
        p, count = problem.rank_count, problem.stage_count
        self.problem, self.before = problem, {F: before_f, B: before_b}
        self.limits: Sequence[float] = [inf] * p if limits is None else limits
        self.spare = [0] * p if known is None else [max(known) - waited for waited in known]
        self.ends: list[list[int]] = [[] for _ in range(3 * count)]  # per group
        self.orders: list[list[int]] = [[] for _ in range(p)]
        self.clock, self.held, self.waited = [0] * p, [0] * p, [0] * p
        self.pending: list[deque[int]] = [deque() for _ in range(p)]  # groups of Ws

    def run(self) -> None:
        self._warm_up()
        p, m = self.problem.rank_count, self.problem.microbatches
        for _ in range(2 * m):
            ups = [self._b_goes_up(rank) for rank in range(p)]
            for rank in reversed(range(p)):
                if ups[rank]:
                    self._wait_for(rank, self._group(B, rank, up=True))
            for rank in range(p):
                if not ups[rank]:
                    self._wait_for(rank, self._group(B, rank, up=False))
            for rank in range(p):
                group = self._next_f(rank)
                if group is not None:
                    while self.held[rank] + self.problem.grows[group] > self.limits[rank]:
                        self._run_w(rank)
                    self._wait_for(rank, group)
        for rank in range(p):
            while self.pending[rank]:
                self._run_w(rank)

    def _group(self, kind: int, rank: int, *, up: bool) -> int:
        """F goes down the ranks through stages 0 to p - 1 and up through the others, B down through these and up."""
        later = up if kind == F else not up
        stage = 2 * self.problem.rank_count - 1 - rank if later else rank
        return kind * self.problem.stage_count + stage

    def _done(self, kind: int, rank: int, *, up: bool) -> int:
        return len(self.ends[self._group(kind, rank, up=up)])

    def _warm_up(self) -> None:
        p, m = self.problem.rank_count, self.problem.microbatches
        for rank in range(p):
            self._run(rank, self._group(F, rank, up=False))
        for rank in reversed(range(p)):
            down, up = self._group(F, rank, up=False), self._group(F, rank, up=True)
            room = self.problem.grows[down] * (2 + 2 * rank)
            while (
                rank < p - 1
                and self.held[rank] + room <= self.limits[rank]
                and self.clock[rank] + self.problem.ticks[down] <= self._arrival(up)
                and len(self.ends[down]) < m
            ):
                for earlier in range(rank + 1):
                    self._run(earlier, self._group(F, earlier, up=False))
            self._run(rank, up)
        up_next = False
        for rank in range(1, p):
            while self._behind(rank):
                for later in reversed(range(rank, p)):
                    if self._done(F, later, up=up_next) < m:
                        self._run(later, self._group(F, later, up=up_next))
                up_next = not up_next

    def _behind(self, rank: int) -> bool:
        """Whether the rank has run fewer Fs than the rank before it, or no more Fs up."""
        ups = [self._done(F, r, up=True) for r in (rank - 1, rank)]
        downs = [self._done(F, r, up=False) for r in (rank - 1, rank)]
        return ups[1] + downs[1] < ups[0] + downs[0] or ups[1] <= ups[0] < self.problem.microbatches

    def _b_goes_up(self, rank: int) -> bool:
        ups, downs = self._done(B, rank, up=True), self._done(B, rank, up=False)
        if ups >= downs:
            return False
        last = rank == self.problem.rank_count - 1
        return last or self._done(B, rank + 1, up=True) > ups or downs >= self.problem.microbatches

    def _next_f(self, rank: int) -> int | None:
        p, m = self.problem.rank_count, self.problem.microbatches
        ups, downs = self._done(F, rank, up=True), self._done(F, rank, up=False)
        if ups >= m:
            return None
        if ups < downs and (rank == p - 1 or self._done(F, rank + 1, up=True) > ups):
            return self._group(F, rank, up=True)
        if ups >= downs or (downs < m and (rank == 0 or self._done(F, rank - 1, up=False) > downs)):
            return self._group(F, rank, up=False)
        return None

    def _wait_for(self, rank: int, group: int) -> None:
        """Run an action, and Ws before it, if the rank would wait long enough."""
        ticks, pending = self.problem.ticks, self.pending[rank]
        arrival = self._arrival(group)
        while pending and arrival >= self.clock[rank] + ticks[pending[0]]:
            self._run_w(rank)
        allowed = max(max(self.waited), self.spare[rank]) - self.waited[rank]
        if pending and arrival - self.clock[rank] > allowed and self.before[group // self.problem.stage_count]:
            self._run_w(rank)
        self._run(rank, group)

    def _arrival(self, group: int) -> int:
        microbatch, latest = len(self.ends[group]), 0
        for source, lag in self.problem.sources[group]:
            if microbatch >= len(self.ends[source]):
                raise Stuck
            latest = max(latest, self.ends[source][microbatch] + lag)
        return latest

    def _run_w(self, rank: int) -> None:
        if not self.pending[rank]:
            raise Stuck
        self._run(rank, self.pending[rank].popleft())

    def _run(self, rank: int, group: int) -> None:
        problem, m = self.problem, self.problem.microbatches
        if len(self.ends[group]) >= m or self.held[rank] + problem.grows[group] > self.limits[rank]:
            raise Stuck
        start = max(self.clock[rank], self._arrival(group))
        if self.orders[rank]:
            self.waited[rank] += start - self.clock[rank]
        self.clock[rank] = start + problem.ticks[group]
        self.held[rank] += problem.grows[group]
        self.orders[rank].append(group * m + len(self.ends[group]))
        self.ends[group].append(self.clock[rank])
        if problem.stage_count <= group < 2 * problem.stage_count:
            self.pending[rank].append(group + (W - B) * problem.stage_count)
