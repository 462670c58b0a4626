"""The strongest proven lower bound for given costs, placement and limit, raised as far as time allows.

Takes   a cost table, a number of microbatches, a limit per rank; later the cost of a schedule, and a deadline.
Gives   a `Certificate`: the bound in seconds, and which argument gives it.
Raises  nothing. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from time import perf_counter

from zbfx.plan import CostTable, Number
from zbfx.schedule.bounds.chain import LinearPipeline, chain_pipeline, split_only
from zbfx.schedule.bounds.closed_form import (
    head_tail_bound,
    occupancy_bound,
    one_rank_bound,
    stream_bound,
    ways_on_ranks,
    work_bound,
)
from zbfx.schedule.bounds.propagation import Propagation, propagation_bound
from zbfx.timing.exact import instance

FINE_TICKS = 1 << 28  # of the longest action
NINE_DIGITS = Fraction(1, 10**9)


class Certificate:
    """Lower bounds in seconds, as exact fractions. `warm_up`: per stage fewest and most Fs before its first B. `slack`:
    by this share a schedule may be longer than the bound and counts as optimal: 0, but where costs have so many digits
    that sums which ought to be equal differ in the last ones."""

    def __init__(self, costs: CostTable, microbatches: int, limits: Sequence[Number] | None) -> None:
        problem = instance(split_only(costs), microbatches)
        units = problem.units(limits)
        self.ticks_per_s = problem.ticks_per_s
        self.slack = NINE_DIGITS if max(problem.ticks) > FINE_TICKS else Fraction(0)
        self.pipe = chain_pipeline(problem, units)
        between = ways_on_ranks(problem)
        self.warm_up: tuple[tuple[int, int], ...] | None = None
        self.arguments = {
            "work": work_bound(problem),
            "one rank": one_rank_bound(problem, units, between),
            "occupancy": occupancy_bound(problem, units, between),
        }
        if isinstance(self.pipe, LinearPipeline):
            head_tail = head_tail_bound(self.pipe)
            self.warm_up = head_tail.warm_up
            self.arguments |= {"head and tail": head_tail.cost, "stream": stream_bound(self.pipe)}
        self._states: Propagation | None = None

    @property
    def ticks(self) -> int:
        return max(self.arguments.values())

    @property
    def seconds(self) -> Fraction:
        return Fraction(self.ticks, self.ticks_per_s)

    @property
    def met_s(self) -> Fraction:
        """What a schedule may cost that counts as optimal."""
        return self.seconds * (1 + self.slack)

    @property
    def argument(self) -> str:
        """Which bound is the strongest."""
        return max(self.arguments, key=lambda name: self.arguments[name])

    def raise_towards(self, cost_s: Fraction, deadline_s: float) -> None:
        """Propagate windows below the cost of a known schedule; `deadline_s` is a reading of perf_counter."""
        cost = ceil(cost_s * self.ticks_per_s * (1 - self.slack / 2))
        if self.pipe is None or cost <= self.ticks or perf_counter() > deadline_s:
            return
        if self._states is None:
            self._states = Propagation.of(self.pipe, cost)
        if self._states is not None:
            self.arguments["propagation"] = propagation_bound(self._states, self.ticks, cost, deadline_s)
