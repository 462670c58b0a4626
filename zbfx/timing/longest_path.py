"""Longest paths through the actions of coded orders: the arithmetic under the simulator and the search.

Takes   an `Instance` and one order of codes per rank.
Gives   the start ticks of all actions, the iteration time, the most memory that an order holds.
Raises  nothing: orders in which ranks wait for one another for ever give paths that are not `complete`.
Source  appendix G of the paper: what an action waits for, and the cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbfx.timing.exact import Instance


@dataclass(frozen=True)
class LongestPaths:
    """Start ticks per rank and position, how many of its actions each rank reached, and whether all were."""

    starts: tuple[tuple[int, ...], ...]
    reached: tuple[int, ...]
    complete: bool


def longest_paths(problem: Instance, orders: Sequence[Sequence[int]]) -> LongestPaths:
    """When the actions of coded orders start. Ranks that wait for one another for ever stay where they stand."""
    m = problem.microbatches
    ticks, output = problem.ticks, problem.output
    sources = [[(group * m, lag) for group, lag in needed] for needed in problem.sources]
    ends = [-1] * (3 * problem.stage_count * m)
    starts: list[list[int]] = [[] for _ in orders]
    clocks = [0] * len(orders)
    waiting: dict[int, list[int]] = {}
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order, begun, clock = orders[rank], starts[rank], clocks[rank]
        for position in range(len(begun), len(order)):
            group, microbatch = divmod(order[position], m)
            start = clock
            for base, lag in sources[group]:
                end = ends[base + microbatch]
                if end < 0:
                    waiting.setdefault(base + microbatch, []).append(rank)
                    start = -1
                    break
                if end + lag > start:
                    start = end + lag
            if start < 0:
                break
            begun.append(start)
            clock = start + ticks[group]
            produced = output[group] * m + microbatch
            ends[produced] = clock
            if produced in waiting:
                runnable.extend(waiting.pop(produced))
        clocks[rank] = clock
    reached = tuple(map(len, starts))
    return LongestPaths(tuple(map(tuple, starts)), reached, reached == tuple(map(len, orders)))


def iteration_ticks(problem: Instance, orders: Sequence[Sequence[int]], starts: Sequence[Sequence[int]]) -> int:
    """The paper's cost: the longest rank's time from its first start to its last end."""
    m, ticks = problem.microbatches, problem.ticks
    return max(
        (begun[-1] + ticks[order[-1] // m] - begun[0] for order, begun in zip(orders, starts, strict=True) if order),
        default=0,
    )


def peak_units(problem: Instance, order: Sequence[int]) -> int:
    """The most that one rank's order ever holds, without what it holds throughout."""
    m, grows = problem.microbatches, problem.grows
    held = peak = 0
    for code in order:
        held += grows[code // m]
        if held > peak:
            peak = held
    return peak
