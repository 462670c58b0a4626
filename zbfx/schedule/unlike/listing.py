"""Orders of unlike microbatches made event by event.

Takes   costs, an order of microbatches, a rule, and whether there are Bs and Ws.
Gives   an `UnlikePass`: when each action of each rank runs.
Raises  nothing. Source: list scheduling as in section 3.1 of the paper; the rules are ours.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from zbfx.schedule.unlike.problem import Unlike
from zbfx.timing.exact import B, F, W

TimedAction = tuple[int, int, int, float, float]  # kind, stage, microbatch, start, end


@dataclass(frozen=True)
class UnlikeRule:
    """`cap[s]`: most Fs of stage s whose B has not run. `patience`: a W starts where it fits so many times into the gap
    before the next arrival. `share`: a B goes before an F where its microbatch has at least this share of the work of
    the F's. Of several Bs, that with the most work goes first (`heavy`, 1), that with the least (-1), or that whose F
    came first (0). `in_order`: Bs run in the order of their Fs. `eager`: Ws run before all else."""

    cap: tuple[int, ...]
    patience: float = 0.5
    share: float = 0.9
    heavy: int = 1
    in_order: bool = False
    eager: bool = False


@dataclass(frozen=True)
class UnlikePass:
    order: tuple[int, ...]
    rule: UnlikeRule
    iteration_s: float
    end_s: float
    ranks: list[list[TimedAction]]
    peaks: list[float]

    @property
    def cost(self) -> tuple[float, float]:
        return self.iteration_s, self.end_s


def listed_pass(problem: Unlike, order: Sequence[int], rule: UnlikeRule, trains: bool) -> UnlikePass | None:
    """A free rank takes the heavier of a B and an F that have arrived and fit into its memory, else a W that fits into
    the gap before the next arrival, and waits otherwise. None: ranks are stuck at their limits."""
    return _Pass(problem, order, rule, trains).run()


class _Pass:
    def __init__(self, problem: Unlike, order: Sequence[int], rule: UnlikeRule, trains: bool) -> None:
        self.problem, self.order, self.rule, self.trains = problem, order, rule, trains
        stages, m, ranks = len(problem.placement), len(order), problem.rank_count
        self.limits = [inf] * ranks if problem.limits is None or not trains else list(problem.limits)
        self.saved, self.later = problem.held
        self.work = problem.work
        place = {k: position for position, k in enumerate(order)}
        self.urgency = [rule.heavy * -self.work[k] if rule.heavy else place[k] for k in range(m)]
        self.targets = problem.targets
        self.missing = [[[count] * m for count in problem.source_counts[kind]] for kind in (F, B)]
        self.arrived = [[[0.0] * m for _ in range(stages)] for _ in (F, B)]
        self.here = [[not count] * m for count in problem.source_counts[F]]  # whether an F has arrived, by stage
        self.begun = [0] * stages  # Fs
        self.backed = [0] * stages  # Bs
        self.coming: list[list[tuple[float, int, int, int]]] = [[] for _ in range(ranks)]  # known arrivals
        self.ready: list[list[tuple[int, float, int]]] = [[] for _ in range(ranks)]  # Bs: -stage, urgency, microbatch
        self.waiting: list[list[tuple[float, int, int]]] = [[] for _ in range(ranks)]  # Ws: seconds, stage, microbatch
        self.held = [0.0] * ranks
        self.peaks = [0.0] * ranks
        self.ranks: list[list[TimedAction]] = [[] for _ in range(ranks)]

    def run(self) -> UnlikePass | None:
        ranks, seconds = self.ranks, self.problem.seconds
        free = [0.0] * len(ranks)
        events = [(0.0, rank) for rank in range(len(ranks))]
        while events:
            now, rank = heappop(events)
            if free[rank] > now:
                continue
            kind, stage, k = self.choose(rank, now)
            if kind < 0:
                continue
            end = now + seconds[kind][stage][k]
            free[rank] = end
            ranks[rank].append((kind, stage, k, now, end))
            self.take(rank, kind, stage, k)
            heappush(events, (end, rank))
            if kind == W:
                continue
            for after, target, receiver, lags in self.targets[kind][stage]:
                if not self.trains and after == B:
                    continue
                at = end + lags[k]
                arrived = self.arrived[after][target]
                if arrived[k] < at:
                    arrived[k] = at
                missing = self.missing[after][target]
                missing[k] -= 1
                if not missing[k]:
                    at = arrived[k]
                    heappush(self.coming[receiver], (at, after, target, k))
                    if free[receiver] < at:
                        heappush(events, (at, receiver))
        m = len(self.order)
        expected = [len(own) * m * (3 if self.trains else 1) for own in self.problem.stages]
        if any(len(made) < total for made, total in zip(ranks, expected, strict=True)):
            return None
        iteration_s = max(made[-1][4] - made[0][3] for made in ranks)
        return UnlikePass(tuple(self.order), self.rule, iteration_s, max(free), ranks, self.peaks)

    def take(self, rank: int, kind: int, stage: int, k: int) -> None:
        """Note that an action begins, and what it holds."""
        if kind == F:
            self.begun[stage] += 1
            if not self.trains:
                return
            self.held[rank] += self.saved[stage][k]
        elif kind == B:
            self.backed[stage] += 1
            self.ready[rank].remove((-stage, self.urgency[k], k))
            insort(self.waiting[rank], (self.problem.seconds[W][stage][k], stage, k))
            self.held[rank] += self.later[stage][k] - self.saved[stage][k]
        else:
            self.held[rank] -= self.later[stage][k]
        if self.held[rank] > self.peaks[rank]:
            self.peaks[rank] = self.held[rank]

    def choose(self, rank: int, now: float) -> tuple[int, int, int]:
        """The kind, stage and microbatch that a rank runs next; the kind is -1 if it waits."""
        rule, coming, ready, waiting = self.rule, self.coming[rank], self.ready[rank], self.waiting[rank]
        while coming and coming[0][0] <= now:
            _, kind, stage, k = heappop(coming)
            if kind == B:
                insort(ready, (-stage, self.urgency[k], k))
            else:
                self.here[stage][k] = True
        if rule.eager and waiting:
            return W, *waiting.pop()[1:]
        room = self.limits[rank] - self.held[rank]
        blocked = False
        backward = forward = (-1, -1)
        for low, _, k in ready:
            if rule.in_order and self.order[self.backed[-low]] != k:
                continue
            if self.later[-low][k] - self.saved[-low][k] > room:
                blocked = True
                continue
            backward = -low, k
            break
        m = len(self.order)
        for stage in self.problem.stages[rank]:
            begun = self.begun[stage]
            if begun == m or not self.here[stage][self.order[begun]]:
                continue
            k = self.order[begun]
            if begun - self.backed[stage] >= rule.cap[stage] or self.needs(rank, stage, k) > room:
                blocked = True
                continue
            forward = stage, k
            break
        if backward[0] >= 0 and (forward[0] < 0 or self.work[backward[1]] >= rule.share * self.work[forward[1]]):
            return B, *backward
        if forward[0] >= 0:
            return F, *forward
        if not waiting:
            return -1, 0, 0
        gap = coming[0][0] - now if coming and not blocked else inf
        fits = bisect_right(waiting, (gap, len(self.begun), 0))
        if not fits and gap < rule.patience * waiting[0][0]:
            return -1, 0, 0
        return W, *waiting.pop(max(0, fits - 1))[1:]

    def needs(self, rank: int, stage: int, k: int) -> float:
        """The bytes that an F must find free: no B comes back before the later stages of its rank have run, and what
        that B adds must fit too."""
        if self.limits[rank] == inf:
            return 0.0
        found, grows = 0.0, 0.0
        for later in self.problem.stages[rank]:
            if later >= stage:
                found += self.saved[later][k]
                grows = max(grows, self.later[later][k] - self.saved[later][k])
        return found + grows
