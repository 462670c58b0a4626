"""The one simulator: when every action of a schedule runs, and what each rank holds meanwhile.

Takes   a cost table, a number of microbatches, an order of actions per rank.
Gives   a `Timeline`. An action starts as soon as its rank has finished the action before it and every value that it
        needs has arrived. Sending takes time on the edge, none on the rank.
Raises  `InvalidSchedule` for orders that cannot run to their end.
Source  appendix G of the paper, constraints (formula:Fdep) to (formula:ScheduleDep).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbfx.errors import InvalidSchedule
from zbfx.plan import Action, CostTable, Span
from zbfx.timing.deadlock import describe_deadlock
from zbfx.timing.exact import Instance, instance
from zbfx.timing.longest_path import iteration_ticks, longest_paths


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule. `memory[r]` lists (time in seconds, bytes held from then on), `static_bytes` included."""

    spans: tuple[tuple[Span, ...], ...]
    peak_bytes: tuple[float, ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    iteration_ticks: int  # the paper's cost, exactly, in units of 1 / ticks_per_s
    ticks_per_s: int

    @property
    def iteration_s(self) -> float:
        return self.iteration_ticks / self.ticks_per_s


def timeline(costs: CostTable, problem: Instance, ranks: Sequence[Sequence[Action]]) -> Timeline | None:
    """The timed schedule, or None if some ranks wait for one another for ever."""
    orders = problem.encode(ranks)
    result = longest_paths(problem, orders)
    if not result.complete:
        return None
    m, ticks, grows, scale = problem.microbatches, problem.ticks, problem.grows, problem.ticks_per_s
    spans, memory, peaks = [], [], []
    for rank, (actions, order, starts) in enumerate(zip(ranks, orders, result.starts, strict=True)):
        held, steps = problem.static[rank], [(0.0, problem.bytes(problem.static[rank]))]
        timed = []
        for action, code, start in zip(actions, order, starts, strict=True):
            group = code // m
            begin, end = start / scale, (start + ticks[group]) / scale
            timed.append(Span(action, begin, end))
            held += grows[group]
            # Growth counts from the start of an action, release from its end.
            steps.append((begin if grows[group] > 0 else end, held / problem.units_per_byte))
        spans.append(tuple(timed))
        memory.append(tuple(steps))
        peaks.append(max(size for _, size in steps))
    return Timeline(tuple(spans), tuple(peaks), tuple(memory), iteration_ticks(problem, orders, result.starts), scale)


def simulate(costs: CostTable, microbatches: int, ranks: Sequence[Sequence[Action]]) -> Timeline:
    """Time `ranks`, one order of actions per rank. Raises InvalidSchedule if it cannot run to its end."""
    problem = instance(costs, microbatches)
    timed = timeline(costs, problem, ranks)
    if timed is None:
        raise InvalidSchedule(describe_deadlock(problem, problem.encode(ranks)))
    return timed
