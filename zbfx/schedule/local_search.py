"""Tabu search on the order of every rank, in the manner of job-shop scheduling.

Within a kind and stage microbatches run in order, so a rank's order is a word of groups (see `exact.Instance`). The cost
is a longest path; only a change on it can help. A move takes one letter of a block of the path, a run of letters on one
rank, to another place in that block. Its effect is estimated from the longest paths into and out of every action, in
time proportional to the stretch that changes, and the best move whose result was not visited lately is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter

from zbfx.schedule.exact import Instance
from zbfx.schedule.listing import Listed

MOST_MOVES_PER_BLOCK = 60
PATIENCE = 150  # moves without a better schedule before the search returns to the best one


@dataclass(frozen=True)
class Move:
    """Rank `rank` runs `codes` at its positions from `low` on."""

    rank: int
    low: int
    codes: tuple[int, ...]


@dataclass
class State:
    """One set of orders with its longest paths."""

    orders: list[list[int]]
    ends: list[int]
    swept: list[int]  # all codes, each after those that it waits for
    begun: list[int]  # first start per rank
    cost: int


def _reversed(needs: Sequence[tuple[tuple[int, int], ...]]) -> list[tuple[tuple[int, int], ...]]:
    feeds: list[list[tuple[int, int]]] = [[] for _ in needs]
    for code, needed in enumerate(needs):
        for source, lag in needed:
            feeds[source].append((code, lag))
    return [tuple(fed) for fed in feeds]


class LocalSearch:
    def __init__(self, problem: Instance, limits: Sequence[int] | None, seed: int) -> None:
        self.problem, self.random = problem, Random(seed)
        count, m = problem.stage_count, problem.microbatches
        self.limits = limits
        self.ticks = [problem.ticks[group] for group in range(3 * count) for _ in range(m)]
        # A stage's own F, B and W are in order in every word that `_stretch` lets through.
        self.needs: list[tuple[tuple[int, int], ...]] = [
            tuple((source * m + j, lag) for source, lag in problem.sources[group] if source % count != group % count)
            for group in range(3 * count)
            for j in range(m)
        ]
        rank_of = [problem.placement[group % count] for group in range(3 * count) for _ in range(m)]
        self.remote_needs = [
            tuple(need for need in needed if rank_of[need[0]] != rank_of[code])
            for code, needed in enumerate(self.needs)
        ]
        self.feeds, self.remote_feeds = _reversed(self.needs), _reversed(self.remote_needs)
        self.visited: dict[int, int] = {}

    def improve(self, start: Listed, target: int, deadline_s: float, steps: int) -> Listed:
        """The best schedule found from `start` in `steps` moves, or until its cost is `target` or the clock reads `deadline_s`."""
        state = self._evaluate([list(order) for order in start.orders])
        assert state is not None
        best = start
        stale = 0
        self.visited.clear()
        for step in range(steps):
            if best.cost <= target or perf_counter() > deadline_s:
                break
            following = self._step(state, best.cost, step)
            stale += 1
            if following is None or stale > PATIENCE:
                state, stale = self._kicked(best), 0
                continue
            state = following
            if state.cost < best.cost:
                best, stale = Listed(state.cost, tuple(map(tuple, state.orders))), 0
        return best

    def _evaluate(self, orders: list[list[int]]) -> State | None:
        """Longest paths into every action; None if the orders deadlock."""
        ticks, needs = self.ticks, self.needs
        ends = [-1] * len(ticks)
        swept: list[int] = []
        positions, clocks = [0] * len(orders), [0] * len(orders)
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
                swept.append(code)
                position += 1
                if code in waiting:
                    runnable.extend(waiting.pop(code))
            positions[rank], clocks[rank] = position, clock
        if len(swept) < len(ticks):
            return None
        begun = [ends[order[0]] - ticks[order[0]] for order in orders]
        cost = max(clock - first for clock, first in zip(clocks, begun, strict=True))
        return State(orders, ends, swept, begun, cost)

    def _tails(self, state: State) -> list[int]:
        """Longest paths out of every action, the action itself excluded, to the end of the rank that finishes last."""
        ticks, feeds = self.ticks, self.feeds
        tails = [0] * len(ticks)
        following = [-1] * len(ticks)
        for order, first in zip(state.orders, state.begun, strict=True):
            for code, after in zip(order, order[1:], strict=False):
                following[code] = after
            tails[order[-1]] = -first
        for code in reversed(state.swept):
            after = following[code]
            longest = tails[after] + ticks[after] if after >= 0 else tails[code]
            for fed, lag in feeds[code]:
                path = tails[fed] + ticks[fed] + lag
                if path > longest:
                    longest = path
            tails[code] = longest
        return tails

    def _critical_blocks(self, state: State) -> list[tuple[int, int, int]]:
        """One longest path, from its end: (rank, first position, last position) of its stretches."""
        ends, ticks = state.ends, self.ticks
        place = {
            code: (rank, position) for rank, order in enumerate(state.orders) for position, code in enumerate(order)
        }
        last = [ends[order[-1]] - first for order, first in zip(state.orders, state.begun, strict=True)]
        rank = self.random.choice([rank for rank, span in enumerate(last) if span == state.cost])
        position = high = len(state.orders[rank]) - 1
        blocks = []
        while True:
            code = state.orders[rank][position]
            start = ends[code] - ticks[code]
            sources = [source for source, lag in self.remote_needs[code] if ends[source] + lag == start]
            local = position > 0 and ends[state.orders[rank][position - 1]] == start
            if local and not (sources and self.random.random() < 0.5):
                position -= 1
                continue
            blocks.append((rank, position, high))
            if not sources:
                return blocks
            rank, position = place[self.random.choice(sources)]
            high = position

    def _stretch(self, state: State, rank: int, low: int, groups: list[int]) -> tuple[int, ...] | None:
        """Codes of `groups` from position `low` on; None if a microbatch's F, B, W fall out of order or memory overflows."""
        problem, m = self.problem, self.problem.microbatches
        count = problem.stage_count
        done: dict[int, int] = {}
        held = 0
        for code in state.orders[rank][:low]:
            group = code // m
            done[group] = done.get(group, 0) + 1
            held += problem.grows[group]
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

    def _moves(self, state: State, blocks: list[tuple[int, int, int]]) -> Iterator[Move]:
        m = self.problem.microbatches
        seen = set()
        for rank, low, high in blocks:
            word = [code // m for code in state.orders[rank][low : high + 1]]
            last = high - low
            shifts = (
                [(x, x + 1) for x in range(last)]
                + [(x, last) for x in range(last - 1)]
                + [(x, 0) for x in range(2, last + 1)]
            )
            shifts = [(x, y) for x, y in shifts if word[x] != word[y]]
            if len(shifts) > MOST_MOVES_PER_BLOCK:
                shifts = self.random.sample(shifts, MOST_MOVES_PER_BLOCK)
            for x, y in shifts:
                begin = min(x, y)
                groups = [*word[x + 1 : y + 1], word[x]] if x < y else [word[x], *word[y:x]]
                codes = self._stretch(state, rank, low + begin, groups)
                if codes is not None:
                    move = Move(rank, low + begin, codes)
                    if move not in seen:
                        seen.add(move)
                        yield move

    def _estimate(self, state: State, tails: list[int], move: Move) -> int:
        """Longest path through the changed stretch, with what lies outside it as it was."""
        ticks, ends, order = self.ticks, state.ends, state.orders[move.rank]
        clock = ends[order[move.low - 1]] if move.low else 0
        finished = []
        for code in move.codes:
            for source, lag in self.remote_needs[code]:
                if ends[source] + lag > clock:
                    clock = ends[source] + lag
            clock += ticks[code]
            finished.append(clock)
        beyond = move.low + len(move.codes)
        tail = tails[order[beyond]] + ticks[order[beyond]] if beyond < len(order) else -state.begun[move.rank]
        longest = 0
        for code, end in zip(reversed(move.codes), reversed(finished), strict=True):
            for fed, lag in self.remote_feeds[code]:
                path = tails[fed] + ticks[fed] + lag
                if path > tail:
                    tail = path
            longest = max(longest, end + tail)
            tail += ticks[code]
        return longest

    def _step(self, state: State, best: int, clock: int) -> State | None:
        """The best neighbour that was not visited lately, or None if there is none."""
        tails = self._tails(state)
        ranked = []
        for move in self._moves(state, self._critical_blocks(state)):
            estimate = self._estimate(state, tails, move)
            order = state.orders[move.rank]
            after = [*order[: move.low], *move.codes, *order[move.low + len(move.codes) :]]
            if estimate >= best and self.visited.get(hash((move.rank, *after)), -1) > clock:
                continue
            ranked.append((estimate, self.random.random(), move.rank, after))
        ranked.sort()
        for _, _, rank, after in ranked:
            orders = list(state.orders)
            orders[rank] = after
            following = self._evaluate(orders)
            if following is not None:
                self.visited[hash((rank, *state.orders[rank]))] = clock + self.random.randint(6, 14)
                return following
        return None

    def _kicked(self, best: Listed) -> State:
        """The best schedule with a few neighbours swapped at random."""
        self.visited.clear()
        state = self._evaluate([list(order) for order in best.orders])
        assert state is not None
        m = self.problem.microbatches
        for _ in range(4):
            rank = self.random.randrange(len(state.orders))
            order = state.orders[rank]
            if len(order) < 3:
                continue
            low = self.random.randrange(1, len(order) - 1)
            codes = self._stretch(state, rank, low, [order[low + 1] // m, order[low] // m])
            if codes is None:
                continue
            orders = list(state.orders)
            orders[rank] = [*order[:low], *codes, *order[low + 2 :]]
            state = self._evaluate(orders) or state
        return state
