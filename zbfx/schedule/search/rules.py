"""The rules of list scheduling, and which of them to try, the most promising first.

Takes   an `Instance`, a limit per rank, and the warm-up of schedules that meet the bound, where it is known.
Gives   `Rule`s.
Raises  nothing. Source: section 3.1 of the paper, whose binary choices are fields of a `Rule` here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, product
from math import ceil

import numpy as np

from zbfx.timing.exact import B, F, Instance

PATIENCE_UNIT = 4  # patience is counted in quarters
RULE_PATIENCES = (PATIENCE_UNIT, 0, 3, 2, 1)
FLAGS = ((False, False), (False, True), (True, False), (True, True))  # alternate, recycle


class Turn(Enum):
    """Which of several stages a rank serves first."""

    LATER = 0  # the later stage of the model
    FEWEST = 1  # the stage that has run fewest actions of the kind
    EARLIER = 2
    GROUPED = 3  # the stage whose next microbatch is of the first group of p; of those an earlier F, a later B


@dataclass(frozen=True)
class Rule:
    """`hold[s]`: Fs of stage s before its first B. `cap[s]`: most Fs of stage s without their B after these.
    `patience[r]`: rank r starts a W only if the next arrival is at least patience/4 of that W away. `alternate[r]`:
    after a B, rank r prefers an F to the next B. `recycle[r]`: rank r runs a W before the next B if an F that has
    arrived lacks only memory, to keep as many microbatches in flight as `cap` says. `turn[r]`: which of rank r's stages
    goes first when several could."""

    hold: tuple[int, ...]
    cap: tuple[int, ...]
    patience: tuple[int, ...]
    alternate: tuple[bool, ...]
    recycle: tuple[bool, ...]
    turn: tuple[Turn, ...]


def first_rules(
    problem: Instance, limits: Sequence[int] | None, warm_up: Sequence[tuple[int, int]] | None
) -> Iterator[Rule]:
    """A grid over warm-ups, caps, patience and the other choices. `warm_up`, the range of Fs before the first B in
    which schedules that meet the bound lie, leads where it is known: with patience it meets the bound at the paper's 1p
    limit, without patience at 2p."""
    p = problem.rank_count
    linear = p == problem.stage_count
    shapes = _linear_shapes(problem, limits, warm_up) if linear else _folded_shapes(problem, limits)
    turns = (Turn.LATER,) if linear else (Turn.LATER, Turn.FEWEST, Turn.GROUPED)
    best = 1 if linear else 2
    leading = product(FLAGS[:2], RULE_PATIENCES[:2], turns[:1], shapes[:1])
    best_shapes = product(FLAGS, RULE_PATIENCES, turns, shapes[:best])
    grid = chain(leading, best_shapes, product(FLAGS, RULE_PATIENCES, turns, shapes[best:]))
    for (alternate, recycle), patience, turn, (hold, cap) in grid:
        yield Rule(hold, cap, (patience,) * p, (alternate,) * p, (recycle,) * p, (turn,) * p)


def most_in_flight(problem: Instance, limits: Sequence[int] | None) -> list[int]:
    """Per stage how many of its Fs alone fill the memory of its rank."""
    m = problem.microbatches
    if limits is None:
        return [m] * problem.stage_count
    return [
        min(m, limits[problem.placement[s]] // problem.grows[s]) if problem.grows[s] else m
        for s in range(problem.stage_count)
    ]


def _linear_shapes(
    problem: Instance, limits: Sequence[int] | None, warm_up: Sequence[tuple[int, int]] | None
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(hold, cap) pairs for one stage per rank."""
    m, p = problem.microbatches, problem.stage_count
    most = most_in_flight(problem, limits)

    def bounded(counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(1, min(count, limit)) for count, limit in zip(counts, most, strict=True))

    narrow, wide = bounded([p - i for i in range(p)]), bounded([2 * (p - i) - 1 for i in range(p)])
    holds, caps = [], []
    if warm_up is not None:
        holds = [bounded([high for _, high in warm_up]), bounded([low for low, _ in warm_up])]
        caps = [holds[0]]
    holds += [narrow, wide]
    caps += [
        wide,
        bounded([ceil(1.2 * (p - i)) for i in range(p)]),  # leaves the last stages less than memory allows
        bounded([most[0] - i for i in range(p)]),
        bounded([p - i + 1 for i in range(p)]),
        narrow,
        bounded([2 * (p - i) for i in range(p)]),
        bounded([m] * p),
    ]
    pairs = arrival_shapes(problem, most)
    pairs += [(hold, cap) for hold in holds for cap in caps if all(h <= c for h, c in zip(hold, cap, strict=True))]
    return list(dict.fromkeys(pairs))


def _folded_shapes(problem: Instance, limits: Sequence[int] | None) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(hold, cap) pairs for several stages per rank: in proportion to how far a stage is from the last one. A rank's
    later stages take their part first; its first stage gets its own part or, marked None, all memory left. The second
    pair caps nothing: memory alone decides."""
    count, p, m = problem.stage_count, problem.rank_count, problem.microbatches
    most = most_in_flight(problem, limits)
    pairs = []
    for part, first_part in ((1.25, None), (1.0, None), (1.5, 1.5), (1.25, 1.25), (1.5, None), (1.0, 1.0)):
        cap = [max(1, min(most[s] - 1, ceil(part * (count - s) * 2 * p / count))) for s in range(count)]
        for rank in range(p):
            first, *later = [s for s in range(count) if problem.placement[s] == rank]
            if first_part is None:
                cap[first] = max(1, min(m, most[first] - sum(cap[s] for s in later)))
            else:
                cap[first] = max(1, min(most[first] - len(later), ceil(first_part * (count - first) * 2 * p / count)))
        pairs.append(((1,) * count, tuple(cap)))
    pairs.insert(1, ((1,) * count, (m,) * count))
    return list(dict.fromkeys(pairs))


def arrival_shapes(problem: Instance, most: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(hold, cap) pairs of a plain pipeline by what has arrived when the first B is there. None for other problems, nor
    where stages are alike, and the warm-up that meets the bound is known."""
    if len(set(problem.ticks[: problem.stage_count])) == 1:
        return []
    if problem.placement != tuple(range(problem.stage_count)) or not feeds_the_next(problem):
        return []
    hold = tuple(min(count, fit) for count, fit in zip(arrived(problem), most, strict=True))
    return [(hold, hold), (hold, tuple(most))]


def feeds_the_next(problem: Instance) -> bool:
    """Whether every stage waits for the one before, and its B for that of the one after."""
    count = problem.stage_count
    return all(
        any(source == s - 1 for source, _ in problem.sources[s])
        and any(source == B * count + s for source, _ in problem.sources[B * count + s - 1])
        for s in range(1, count)
    )


def arrived(problem: Instance) -> list[int]:
    """Per stage of a plain pipeline: how many of its Fs can have run when its first B can be there, one at least.

    Where stages differ, Fs reach a rank at the pace of the slowest stage before it. A rank that waits for as many Fs as
    its own time from F0 to B0 has room for makes that B late, and every B before it. So a rank warms up with the Fs
    that have arrived when its first B can be there at the earliest, and keeps that number in flight.
    """
    count, m, ticks = problem.stage_count, problem.microbatches, problem.ticks
    there = [max(lag for source, lag in problem.sources[s] if source == s - 1) for s in range(1, count)]
    back = [
        max(lag for source, lag in problem.sources[B * count + s] if source == B * count + s + 1)
        for s in range(count - 1)
    ]
    steps = np.arange(m)
    ends = np.zeros((count, m))
    arrivals = np.zeros(m)
    for s in range(count):
        time = float(ticks[F * count + s])
        ends[s] = np.maximum.accumulate(arrivals - time * steps) + time * (steps + 1)
        arrivals = ends[s] + (there[s] if s < count - 1 else 0)
    found = [1] * count
    first_b = ends[count - 1, 0]
    for s in reversed(range(count - 1)):
        first_b += ticks[B * count + s + 1] + back[s]
        found[s] = max(1, int(np.searchsorted(ends[s], first_b, side="right")))
    return found
