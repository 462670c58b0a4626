"""Tabu search on the order of every rank, in the manner of job-shop scheduling.

Takes   an `Instance`, a limit per rank, a schedule to start from.
Gives   a schedule that costs no more. Microbatches run in order within a kind and stage, so a rank's order is a word
        whose letters are groups. The cost is a longest path, and only a change on it can help: a move takes a letter of
        a block of the path, a run on one rank, to another place in that block. Longest paths into and out of every
        action estimate its effect. Moves that promise a gain in different blocks are made together, or else the best
        alone, of those whose result was not visited lately.
Raises  nothing. Source: tabu search for job-shop scheduling, with moves inside blocks (Nowicki and Smutnicki 1996).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from time import perf_counter

from zbfx.schedule.search.list_scheduling import Listed
from zbfx.timing.exact import Instance

MOST_MOVES_PER_BLOCK = 60
PATIENCE = 150  # moves without a better schedule before the search returns to the best one
KICKS = (2, 4, 8, 16)  # random swaps when it returns

Links = list[tuple[tuple[int, int], ...]]  # per code: (other code, lag)


@dataclass(frozen=True)
class Move:
    """Rank `rank` runs `codes` at its positions from `low` on."""

    rank: int
    low: int
    codes: tuple[int, ...]

    def applied(self, order: list[int]) -> list[int]:
        return [*order[: self.low], *self.codes, *order[self.low + len(self.codes) :]]


@dataclass
class Solution:
    """One set of orders with the longest path into every action."""

    orders: list[list[int]]
    ends: list[int]
    swept: list[int]  # all codes by start, each after those that it waits for
    begun: list[int]  # first start per rank
    cost: int


def _reversed(needs: Links) -> Links:
    feeds: list[list[tuple[int, int]]] = [[] for _ in needs]
    for code, needed in enumerate(needs):
        for source, lag in needed:
            feeds[source].append((code, lag))
    return [tuple(fed) for fed in feeds]


class LocalSearch:
    """Tabu search on one problem. Its random numbers and what it visited go on from call to call."""

    def __init__(self, problem: Instance, limits: Sequence[int] | None, seed: int) -> None:
        self.problem, self.limits, self.random = problem, limits, Random(seed)
        count, m = problem.stage_count, problem.microbatches
        self.ticks = [problem.ticks[group] for group in range(3 * count) for _ in range(m)]
        # A stage's own F, B and W are in order in every word that `_stretch` lets through.
        self.needs: Links = [
            tuple((source * m + j, lag) for source, lag in problem.sources[group] if source % count != group % count)
            for group in range(3 * count)
            for j in range(m)
        ]
        self.rank_of = [problem.placement[group % count] for group in range(3 * count) for _ in range(m)]
        self.remote_needs: Links = [
            tuple(need for need in needed if self.rank_of[need[0]] != self.rank_of[code])
            for code, needed in enumerate(self.needs)
        ]
        self.feeds, self.remote_feeds = _reversed(self.needs), _reversed(self.remote_needs)
        self.groups = [
            [g for g in range(3 * count) if problem.placement[g % count] == rank] for rank in range(problem.rank_count)
        ]
        self.visited: dict[int, int] = {}  # word of a rank -> step until which it is barred

    def improve(self, start: Listed, target: int, deadline_s: float, steps: int) -> Listed:
        """The best schedule in `steps` moves from `start`; stops at cost `target` or `deadline_s` (perf_counter)."""
        solution = self._evaluate([list(order) for order in start.orders])
        assert solution is not None
        best, stale = start, 0
        self.visited.clear()
        for step in range(steps):
            if best.cost <= target or perf_counter() > deadline_s:
                break
            following = self._step(solution, best.cost, step)
            stale += 1
            if following is None or stale > PATIENCE:
                solution, stale = self._kicked(best), 0
                continue
            solution = following
            if solution.cost < best.cost:
                best, stale = Listed(solution.cost, tuple(map(tuple, solution.orders))), 0
        return best

    def _evaluate(self, orders: list[list[int]], base: Solution | None = None, since: int = 0) -> Solution | None:
        """Longest paths into every action; None if the orders deadlock. What starts before `since` is as in `base`."""
        ticks, needs = self.ticks, self.needs
        if base is None:
            ends, kept = [-1] * len(ticks), []
            positions = [0] * len(orders)
        else:
            ends = base.ends.copy()
            kept = base.swept[: self._first_at(base, base.swept, since)]
            positions = [self._first_at(base, order, since) for order in base.orders]
            for code in base.swept[len(kept) :]:
                ends[code] = -1
        clocks = [ends[order[at - 1]] if at else 0 for order, at in zip(orders, positions, strict=True)]
        fresh: list[int] = []
        waiting: dict[int, list[int]] = {}
        runnable = list(range(len(orders)))
        while runnable:
            rank = runnable.pop()
            order, clock, position = orders[rank], clocks[rank], positions[rank]
            missing = -1
            while position < len(order):
                code = order[position]
                start = clock
                for source, lag in needs[code]:
                    end = ends[source]
                    if end < 0:
                        missing = source
                        break
                    if end + lag > start:
                        start = end + lag
                if missing >= 0:
                    waiting.setdefault(missing, []).append(rank)
                    break
                clock = ends[code] = start + ticks[code]
                fresh.append(code)
                position += 1
                if code in waiting:
                    runnable.extend(waiting.pop(code))
            positions[rank], clocks[rank] = position, clock
        if len(kept) + len(fresh) < len(ticks):
            return None
        fresh.sort(key=lambda code: ends[code] - ticks[code])
        begun = [ends[order[0]] - ticks[order[0]] for order in orders]
        cost = max(clock - first for clock, first in zip(clocks, begun, strict=True))
        return Solution(orders, ends, kept + fresh, begun, cost)

    def _first_at(self, solution: Solution, codes: list[int], time: int) -> int:
        """Position of the first of `codes`, sorted by start, that starts at `time` or later."""
        ends, ticks = solution.ends, self.ticks
        return bisect_left(codes, time, key=lambda code: ends[code] - ticks[code])

    def _tails(self, solution: Solution) -> list[int]:
        """Longest paths out of every action, itself excluded, to the end of the rank that finishes last."""
        ticks, feeds = self.ticks, self.feeds
        tails = [0] * len(ticks)
        following = [-1] * len(ticks)
        for order, first in zip(solution.orders, solution.begun, strict=True):
            for code, after in pairwise(order):
                following[code] = after
            tails[order[-1]] = -first
        for code in reversed(solution.swept):
            after = following[code]
            longest = tails[after] + ticks[after] if after >= 0 else tails[code]
            for fed, lag in feeds[code]:
                path = tails[fed] + ticks[fed] + lag
                if path > longest:
                    longest = path
            tails[code] = longest
        return tails

    def _critical_blocks(self, solution: Solution) -> list[tuple[int, int, int]]:
        """One longest path, from its end: (rank, first position, last position) of its stretches."""
        ends, ticks = solution.ends, self.ticks
        spans = [ends[order[-1]] - first for order, first in zip(solution.orders, solution.begun, strict=True)]
        rank = self.random.choice([rank for rank, span in enumerate(spans) if span == solution.cost])
        position = high = len(solution.orders[rank]) - 1
        blocks = []
        while True:
            order = solution.orders[rank]
            code = order[position]
            start = ends[code] - ticks[code]
            sources = [source for source, lag in self.remote_needs[code] if ends[source] + lag == start]
            local = position > 0 and ends[order[position - 1]] == start
            if local and not (sources and self.random.random() < 0.5):
                position -= 1
                continue
            blocks.append((rank, position, high))
            if not sources:
                return blocks
            code = self.random.choice(sources)
            rank = self.rank_of[code]
            order = solution.orders[rank]
            position = order.index(code, self._first_at(solution, order, ends[code] - ticks[code]))
            high = position

    def _stretch(self, order: list[int], rank: int, low: int, groups: list[int]) -> tuple[int, ...] | None:
        """Codes of `groups` from position `low` on; None if some F, B, W fall out of order or memory overflows."""
        problem, m = self.problem, self.problem.microbatches
        count = problem.stage_count
        done: dict[int, int] = {}
        position = low
        while position > 0 and len(done) < len(self.groups[rank]):
            position -= 1
            done.setdefault(order[position] // m, order[position] % m + 1)
        held = sum(problem.grows[group] * number for group, number in done.items())
        codes = []
        for group in groups:
            index = done.get(group, 0)
            if group >= count and done.get(group - count, 0) <= index:
                return None
            held += problem.grows[group]
            if self.limits is not None and held > self.limits[rank]:
                return None
            codes.append(group * m + index)
            done[group] = index + 1
        return tuple(codes)

    def _moves(self, solution: Solution, block: tuple[int, int, int]) -> Iterator[Move]:
        """Letters of one block exchanged with their neighbours, or taken to one of its ends."""
        rank, low, high = block
        m, last = self.problem.microbatches, high - low
        order = solution.orders[rank]
        word = [code // m for code in order[low : high + 1]]
        shifts = [(x, x + 1) for x in range(last)]
        shifts += [(x, last) for x in range(last - 1)] + [(x, 0) for x in range(2, last + 1)]
        shifts = [(x, y) for x, y in shifts if word[x] != word[y]]
        if len(shifts) > MOST_MOVES_PER_BLOCK:
            shifts = self.random.sample(shifts, MOST_MOVES_PER_BLOCK)
        seen = set()
        for x, y in shifts:
            begin = min(x, y)
            groups = [*word[x + 1 : y + 1], word[x]] if x < y else [word[x], *word[y:x]]
            codes = self._stretch(order, rank, low + begin, groups)
            if codes is not None and (begin, codes) not in seen:
                seen.add((begin, codes))
                yield Move(rank, low + begin, codes)

    def _estimate(self, solution: Solution, tails: list[int], move: Move) -> int:
        """Longest path through the changed stretch, with what lies outside it as it was."""
        ticks, ends, order = self.ticks, solution.ends, solution.orders[move.rank]
        clock = ends[order[move.low - 1]] if move.low else 0
        finished = []
        for code in move.codes:
            for source, lag in self.remote_needs[code]:
                if ends[source] + lag > clock:
                    clock = ends[source] + lag
            clock += ticks[code]
            finished.append(clock)
        beyond = move.low + len(move.codes)
        tail = tails[order[beyond]] + ticks[order[beyond]] if beyond < len(order) else -solution.begun[move.rank]
        longest = 0
        for code, end in zip(reversed(move.codes), reversed(finished), strict=True):
            for fed, lag in self.remote_feeds[code]:
                path = tails[fed] + ticks[fed] + lag
                if path > tail:
                    tail = path
            longest = max(longest, end + tail)
            tail += ticks[code]
        return longest

    def _step(self, solution: Solution, best: int, clock: int) -> Solution | None:
        """A neighbour of `solution`, or None if all were visited lately."""
        tails = self._tails(solution)
        ranked: list[tuple[int, float, Move]] = []
        promising: list[Move] = []
        for block in self._critical_blocks(solution):
            first = len(ranked)
            for move in self._moves(solution, block):
                ranked.append((self._estimate(solution, tails, move), self.random.random(), move))
            if len(ranked) > first:
                estimate, _, move = min(ranked[first:])
                if estimate < solution.cost:
                    promising.append(move)
        ranked.sort()
        together = self._apply(solution, promising) if len(promising) > 1 else None
        if together is not None and together.cost < solution.cost:
            return together
        for estimate, _, move in ranked:
            after = hash((move.rank, *move.applied(solution.orders[move.rank])))
            if estimate >= best and self.visited.get(after, -1) > clock:
                continue
            following = self._apply(solution, [move])
            if following is not None:
                self.visited[hash((move.rank, *solution.orders[move.rank]))] = clock + self.random.randint(6, 14)
                return following
        return None

    def _apply(self, solution: Solution, moves: list[Move]) -> Solution | None:
        """The solution after moves in different blocks, or None if they deadlock or no longer fit together."""
        orders = list(solution.orders)
        firsts = [orders[move.rank][move.low] for move in moves]
        since = min(solution.ends[code] - self.ticks[code] for code in firsts)
        for move in moves:
            orders[move.rank] = move.applied(orders[move.rank])
            since = min(since, solution.ends[solution.orders[move.rank][move.low - 1]] if move.low else 0)
        return self._evaluate(orders, solution, since)

    def _kicked(self, best: Listed) -> Solution:
        """The best schedule with a few neighbours swapped at random."""
        self.visited.clear()
        solution = self._evaluate([list(order) for order in best.orders])
        assert solution is not None
        m = self.problem.microbatches
        for _ in range(self.random.choice(KICKS)):
            rank = self.random.randrange(len(solution.orders))
            order = solution.orders[rank]
            if len(order) < 3:
                continue
            low = self.random.randrange(1, len(order) - 1)
            codes = self._stretch(order, rank, low, [order[low + 1] // m, order[low] // m])
            if codes is not None:
                solution = self._apply(solution, [Move(rank, low, codes)]) or solution
        return solution
