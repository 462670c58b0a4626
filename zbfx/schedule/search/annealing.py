"""Simulated annealing over whole orders: the order of every rank changes a letter at a time, hot first, then cold.

Takes   an `Instance`, a limit per rank, a schedule to start from.
Gives   a schedule that costs no more. Microbatches run in order within a kind and stage, so a rank's order is a word of
        groups. A letter moves to another place of its word, or a backward is split or fused. A change that costs more
        stays with a chance that falls with the temperature.
Raises  nothing. Source: Kirkpatrick et al. 1983; on job-shop scheduling van Laarhoven et al. 1992.

A step takes microseconds where numba is installed (`pip install zbfx[fast]`), and is not worth taking where it is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import numpy as np

from zbfx.schedule.search.fusing import evaluated, savings
from zbfx.schedule.search.list_scheduling import Listed, whole_numbers
from zbfx.timing.exact import B, F, Instance, W

HOT, COLD = 0.3, 0.02  # temperatures, in mean ticks of an F
ACTIONS_PER_CALL = 20_000_000  # how long the loop runs between two looks at the clock: some .2 s
MOST_ANNEALED = 40_000
MOST_EXACT_TICKS = 1 << 52  # sums of times are exact as floats, too


def available(problem: Instance) -> bool:
    """Whether annealing is worth while: numba is installed, and the problem small enough."""
    actions = 3 * problem.stage_count * problem.microbatches
    longest = problem.microbatches * sum(problem.ticks) + sum(lag for sources in problem.sources for _, lag in sources)
    return find_spec("numba") is not None and actions <= MOST_ANNEALED and longest < MOST_EXACT_TICKS


class Annealing:
    """Annealing of one problem. Its random numbers go on from call to call."""

    def __init__(self, problem: Instance, limits: Sequence[int] | None, seed: int) -> None:
        self.problem, self.limits = problem, limits
        count, m, p = problem.stage_count, problem.microbatches, problem.rank_count
        edges = [
            [(source, lag) for source, lag in problem.sources[group] if source % count != group % count]
            for group in range(2 * count)
        ]
        flat = [edge for needed in edges for edge in needed]
        saved = savings(problem)
        self.task = (
            m,
            whole_numbers(problem.ticks),
            whole_numbers(problem.grows),
            whole_numbers([1 << 60] * p if limits is None else limits),
            whole_numbers([sum(map(len, edges[:group])) for group in range(2 * count + 1)]),
            whole_numbers([source for source, _ in flat]),
            whole_numbers([lag for _, lag in flat]),
            whole_numbers(problem.placement),
            np.array([saved[stage] > 0 for stage in range(count)]),
        )
        self.state = np.array([0x9E3779B97F4A7C15 * (seed + 1) % (1 << 64) or 1], dtype=np.uint64)
        self.width = 1 + 3 * m * max(problem.placement.count(rank) for rank in range(p))
        self.unit = max(1.0, sum(problem.ticks[:count]) / count)

    def improve(self, start: Listed, target: int, deadline_s: float, steps: int) -> Listed:
        """The best schedule in `steps` changes from `start`; stops at cost `target` or `deadline_s` (perf_counter)."""
        anneal = _loop()
        p, outputs = self.problem.rank_count, 2 * self.problem.stage_count * self.problem.microbatches
        groups, lengths = self._words(start.orders)
        words = (groups, lengths, *(np.zeros_like(groups) for _ in range(4)))
        times = (np.zeros_like(groups), *_filled(2, outputs))
        trial = (np.zeros_like(groups), *_filled(3, outputs), *_filled(6, p))
        best, best_lengths, cost = groups.copy(), lengths.copy(), start.cost
        calls = max(1, steps * int(lengths.sum()) // ACTIONS_PER_CALL)
        cooling = (COLD / HOT) ** (1 / calls)
        for call in range(calls):
            if cost <= target or perf_counter() > deadline_s:
                break
            hot = HOT * self.unit * cooling**call
            cost = anneal(
                self.task,
                words,
                times,
                trial,
                self.state,
                best,
                best_lengths,
                cost,
                target,
                hot,
                hot * cooling,
                steps // calls,
            )
        if cost >= start.cost:
            return start
        found = evaluated(self.problem, self._orders(best, best_lengths), self.limits)
        assert found is not None, "the loop runs orders as the simulator does"
        assert found.cost == cost, "the loop times orders as the simulator does"
        return found

    def _words(self, orders: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        words = np.zeros((len(orders), self.width), dtype=np.int64)
        for rank, order in enumerate(orders):
            words[rank, : len(order)] = [code // self.problem.microbatches for code in order]
        return words, whole_numbers([len(order) for order in orders])

    def _orders(self, words: Any, lengths: Any) -> list[list[int]]:
        return [self._order(word[:length].tolist()) for word, length in zip(words, lengths.tolist(), strict=True)]

    def _order(self, word: Sequence[int]) -> list[int]:
        """The codes of a word. A W is that of the first microbatch that waits for one."""
        count, m = self.problem.stage_count, self.problem.microbatches
        done = [0] * (2 * count)
        waiting: list[deque[int]] = [deque() for _ in range(count)]
        codes = []
        for group in word:
            kind, stage = divmod(group, count)
            if kind == W:
                microbatch = waiting[stage].popleft()
            else:
                output = F * count + stage if kind == F else B * count + stage
                microbatch = done[output]
                done[output] += 1
                if kind == B:
                    waiting[stage].append(microbatch)
            codes.append(group * m + microbatch)
        return codes


def _filled(number: int, size: int) -> list[Any]:
    return [np.full(size, -1, dtype=np.int64) for _ in range(number)]


def _loop() -> Callable[..., Any]:
    from zbfx.schedule.search.annealing_loop import anneal  # needs numba, which takes .3 s to import

    return anneal
