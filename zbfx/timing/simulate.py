"""The one simulator: when every action of a schedule runs, and what each rank holds meanwhile.

Takes   a cost table, a number of microbatches, an order of actions per rank.
Gives   a `Timeline`. An action starts as soon as its rank has finished the action before it and every value that it
        needs has arrived. Sending takes time on the edge, none on the rank.
Raises  `InvalidSchedule` for a deadlock. Source: appendix G of the paper, (formula:Fdep) to (formula:ScheduleDep).

Ranks stop for ever only at a cycle of data and order. Every ordered pair of ranks has one first-in-first-out channel,
on which values are sent right after their action. A send holds its channel, not the rank. Before an action the receiver
takes what its channels carry, up to the values that it needs: no channel waits for a value behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zbfx.errors import InvalidSchedule
from zbfx.plan import Action, CostTable
from zbfx.timing.exact import Instance, instance, iteration_ticks, longest_paths, peak_units
from zbfx.timing.views import SpanView


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule."""

    spans: tuple[SpanView, ...]
    peak_units: tuple[int, ...]  # without what is held throughout
    iteration_ticks: int  # the paper's cost, exactly, in units of 1 / ticks_per_s
    problem: Instance

    @property
    def ticks_per_s(self) -> int:
        return self.problem.ticks_per_s

    @property
    def iteration_s(self) -> float:
        return self.iteration_ticks / self.ticks_per_s

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most that each rank holds, static bytes included."""
        problem = self.problem
        return tuple(problem.bytes(s + peak) for s, peak in zip(problem.static, self.peak_units, strict=True))

    @property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Per rank (time in seconds, bytes held from then on), static bytes included."""
        return tuple(self._memory(rank) for rank in range(len(self.spans)))

    def _memory(self, rank: int) -> tuple[tuple[float, float], ...]:
        problem, spans = self.problem, self.spans[rank]
        held, m = problem.static[rank], problem.microbatches
        steps = [(0.0, problem.bytes(held))]
        for code, begin, end in zip(
            spans.actions.codes.tolist(), spans.starts_s.tolist(), spans.ends_s.tolist(), strict=True
        ):
            grows = problem.grows[code // m]
            held += grows
            # Growth counts from the start of an action, release from its end.
            steps.append((begin if grows > 0 else end, problem.bytes(held)))
        return tuple(steps)


def timeline(problem: Instance, orders: Sequence[Sequence[int]]) -> Timeline | None:
    """The timed schedule of coded orders, or None if some ranks wait for one another for ever. All times are late
    enough for each rank to run the prologues of its stages before."""
    result = longest_paths(problem, orders)
    if not result.complete:
        return None
    m, ticks = problem.microbatches, problem.ticks
    early = [once - begun[0] for once, begun in zip(problem.prologue, result.starts, strict=True) if begun]
    lead = max([0, *early])
    spans, peaks = [], []
    for order, view, begun in zip(orders, problem.decode(orders), result.starts, strict=True):
        starts = [start + lead for start in begun] if lead else begun
        ends = [start + ticks[code // m] for start, code in zip(starts, order, strict=True)]
        spans.append(SpanView(view, in_seconds(starts, problem.ticks_per_s), in_seconds(ends, problem.ticks_per_s)))
        peaks.append(peak_units(problem, order))
    return Timeline(tuple(spans), tuple(peaks), iteration_ticks(problem, orders, result.starts), problem)


def in_seconds(ticks: Sequence[int], ticks_per_s: int) -> NDArray[np.float64]:
    """Each rounded once, however large its numbers are."""
    return np.array([tick / ticks_per_s for tick in ticks], dtype=np.float64)


def simulate(costs: CostTable, microbatches: int, ranks: Sequence[Sequence[Action]]) -> Timeline:
    """Time `ranks`, one order of actions per rank. Raises InvalidSchedule if it cannot run to its end."""
    problem = instance(costs, microbatches)
    orders = problem.encode(ranks)
    timed = timeline(problem, orders)
    if timed is None:
        raise InvalidSchedule(describe_deadlock(problem, orders))
    return timed


def excerpt(ranks: Sequence[Sequence[Action]], marks: dict[int, int], context: int = 4) -> str:
    """The rank x step grid around the cells `marks` (rank -> step), each drawn as >F0.3<."""
    first = max(0, min(marks.values(), default=0) - context)
    last = min(max(marks.values(), default=0) + context + 1, max(map(len, ranks), default=0))
    cells = [
        [
            f">{order[step]}<" if marks.get(rank) == step else f" {order[step]} "
            for step in range(first, min(last, len(order)))
        ]
        for rank, order in enumerate(ranks)
    ]
    width = max((len(cell) for row in cells for cell in row), default=0)
    lead = "... " if first else ""
    header = "step".ljust(9) + " " * len(lead) + " ".join(str(step).center(width) for step in range(first, last))
    lines = [
        f"rank {rank}".ljust(9)
        + lead
        + " ".join(cell.center(width) for cell in row)
        + (" ..." if last < len(ranks[rank]) else "")
        for rank, row in enumerate(cells)
    ]
    return "\n".join(line.rstrip() for line in [header, *lines])


def describe_deadlock(problem: Instance, orders: Sequence[Sequence[int]]) -> str:
    """Name the cycle (or the action that nobody runs) at which coded `orders` stop."""
    reached = longest_paths(problem, orders).reached
    m = problem.microbatches
    made_by = {
        problem.output[code // m] * m + code % m: (rank, step)
        for rank, order in enumerate(orders)
        for step, code in enumerate(order)
    }

    def needed(rank: int) -> int:
        """The output that `rank` waits for."""
        group, microbatch = divmod(orders[rank][reached[rank]], m)
        for source, _ in problem.sources[group]:
            wanted = source * m + microbatch
            maker = made_by.get(wanted)
            if maker is None or maker[1] >= reached[maker[0]]:
                return wanted
        raise AssertionError("a rank stands still although all that it needs is there")

    rank = next(rank for rank, order in enumerate(orders) if reached[rank] < len(order))
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        wanted = needed(rank)
        if wanted not in made_by:
            stuck = problem.action(orders[rank][reached[rank]])
            text = f"rank {rank} waits at {stuck} for {problem.action(wanted)}, which no rank runs"
            return f"{text}\n{excerpt(problem.decode(orders), {rank: reached[rank]})}"
        rank = made_by[wanted][0]
    cycle = path[path.index(rank) :]
    reasons = []
    for rank in cycle:
        stuck, wanted = problem.action(orders[rank][reached[rank]]), needed(rank)
        maker = made_by[wanted][0]
        waits = problem.action(orders[maker][reached[maker]])
        reasons.append(
            f"rank {rank} waits at {stuck} for {problem.action(wanted)}, which rank {maker} runs only after {waits}"
        )
    picture = excerpt(problem.decode(orders), {rank: reached[rank] for rank in cycle})
    return f"deadlock: {'; '.join(reasons)}. Move one of the marked actions back.\n{picture}"
