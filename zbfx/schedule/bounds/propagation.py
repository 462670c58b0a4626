"""A lower bound by contradiction: assume a schedule costs at most C, shrink each action's possible times to nothing.

Takes   a `ChainPipeline`, a bound, the cost of a schedule, a deadline.
Gives   the largest refuted cost plus one; the windows of all actions in schedules of a cost.
Raises  nothing; None where the problem is too large for this bound.
Source  ours.

The argument. Each rank's first action is F0 of its first stage at a fixed time h, so cost at most C means that all that
it does lies in [h, h + C]. Every action therefore has an earliest start and a latest end (its window), and two kinds of
step shrink windows without losing any schedule of cost at most C:

1. Along dependencies: an action starts no earlier than the earliest end of what it needs plus communication, and ends
   no later than the latest start of what needs it.
2. On one rank, over its states (`states.py`). The earliest time at which a state can be reached under the windows
   follows from its few predecessors, the latest time at which it can be left from its successors. With one stage per
   rank that is exact. With several, Ws fill idle time freely, but no state is reached before the work up to it is done,
   the Ws that memory asks for included, or left so late that the rest no longer fits. Transitions whose earliest
   exceeds their latest time occur in no schedule; the others give each action's new window.

If a window or a rank's final state becomes empty, no schedule costs C or less. This holds whatever the other ranks do,
so it contains the arguments of `head_tail_bound`. Repeated until nothing changes, it also sees how one rank's lateness
bears on the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import perf_counter

import numpy as np

from zbfx.schedule.bounds.chain import ChainPipeline
from zbfx.schedule.bounds.states import Ints, RankStates, letters, rank_states

UNREACHED = 1 << 62
MOST_TICKS = 1 << 60  # sums of two times must stay below UNREACHED


@dataclass(frozen=True)
class PossibleTimes:
    """Earliest starts and latest ends, indexed [kind, stage, microbatch]."""

    earliest: Ints
    latest: Ints


class Propagation:
    """Windows of one problem: `begin` per rank, `counted` the groups of actions that lead from state to state."""

    @classmethod
    def of(cls, pipe: ChainPipeline, most_ticks: int) -> Propagation | None:
        """None where the problem is too large for this bound."""
        states = None if most_ticks > MOST_TICKS else rank_states(pipe)
        return None if states is None else cls(pipe, states)

    def __init__(self, pipe: ChainPipeline, states: RankStates) -> None:
        self.pipe, self.states = pipe, states
        count = len(pipe.stages)
        self.ticks: Ints = np.array([pipe.forward, pipe.backward, pipe.weight], dtype=np.int64)
        self.step_ticks = np.append(np.repeat(self.ticks.ravel(), pipe.microbatches), 0)
        self.begin: Ints = np.zeros(pipe.rank_count, dtype=np.int64)
        for stage in range(pipe.rank_count):
            self.begin[pipe.placement[stage]] = pipe.first_start(stage)
        self.stage_begin = self.begin[np.array(pipe.placement)]
        self.counted = np.zeros((3, count, pipe.microbatches), dtype=bool)
        for rank in range(pipe.rank_count):
            for kind, stage in letters(pipe, rank):
                self.counted[kind, stage] = True

    def possible_times(self, cost: int, deadline_s: float = inf) -> PossibleTimes | None:
        """The windows of all actions in schedules of at most `cost` ticks. None: there are no such schedules."""
        m, count = self.pipe.microbatches, len(self.pipe.stages)
        earliest = np.full(3 * count * m + 1, UNREACHED, dtype=np.int64)
        latest = np.full(3 * count * m + 1, -UNREACHED, dtype=np.int64)
        early, late = earliest[:-1].reshape(3, count, m), latest[:-1].reshape(3, count, m)
        early[:], late[:] = self.stage_begin[:, None], self.stage_begin[:, None] + cost
        while True:
            self._along_dependencies(early, late)
            if (early + self.ticks[:, :, None] > late).any():
                return None
            known = early.copy(), late.copy()
            if not self._on_ranks(earliest, latest, cost):
                return None
            settled = (early == known[0]).all() and (late == known[1]).all()
            if settled or perf_counter() > deadline_s:
                return PossibleTimes(early.copy(), late.copy())

    def _along_dependencies(self, early: Ints, late: Ints) -> None:
        """Step 1, in place, in an order of stages and kinds that reaches the fixed point in one sweep."""
        pipe, ticks = self.pipe, self.ticks[:, :, None]
        elapsed = ticks * np.arange(pipe.microbatches)

        def in_order(kind: int) -> None:
            early[kind] = np.maximum.accumulate(early[kind] - elapsed[kind], axis=1) + elapsed[kind]
            late[kind] = np.minimum.accumulate((late[kind] - elapsed[kind])[:, ::-1], axis=1)[:, ::-1] + elapsed[kind]

        in_order(0)
        for i in pipe.stages[1:]:
            np.maximum(early[0, i], early[0, i - 1] + ticks[0, i - 1] + pipe.there[i - 1], out=early[0, i])
        np.maximum(early[1], early[0] + ticks[0], out=early[1])
        in_order(1)
        for i in reversed(pipe.stages[:-1]):
            np.maximum(early[1, i], early[1, i + 1] + ticks[1, i + 1] + pipe.back[i], out=early[1, i])
        np.maximum(early[2], early[1] + ticks[1], out=early[2])
        in_order(2)
        np.minimum(late[1], late[2] - ticks[2], out=late[1])
        for i in pipe.stages[1:]:
            np.minimum(late[1, i], late[1, i - 1] - ticks[1, i - 1] - pipe.back[i - 1], out=late[1, i])
        np.minimum(late[0], late[1] - ticks[1], out=late[0])
        for i in reversed(pipe.stages[:-1]):
            np.minimum(late[0, i], late[0, i + 1] - ticks[0, i + 1] - pipe.there[i], out=late[0, i])

    def _on_ranks(self, earliest: Ints, latest: Ints, cost: int) -> bool:
        """Step 2, in place; False if some rank has no order left."""
        states, ticks = self.states, self.step_ticks
        kinds, count = states.entered_from.shape
        opens, closes = self.begin[states.rank] + states.spent, self.begin[states.rank] + cost - states.left
        reached = np.full(count + 1, UNREACHED, dtype=np.int64)
        reached[states.initial] = self.begin
        waves = [slice(low, high) for low, high in zip(states.wave[:-1], states.wave[1:], strict=True)]
        for wave in waves[1:]:
            first = np.full(wave.stop - wave.start, UNREACHED, dtype=np.int64)
            for kind in range(kinds):
                action = states.entered_by[kind, wave]
                end = np.maximum(reached[states.entered_from[kind, wave]], earliest[action]) + ticks[action]
                end[end > latest[action]] = UNREACHED
                np.minimum(first, end, out=first)
            np.maximum(first, opens[wave], out=first)
            first[first > closes[wave]] = UNREACHED
            reached[wave] = first
        if (reached[states.final] >= UNREACHED).any():
            return False
        leave = np.full(count + 1, -UNREACHED, dtype=np.int64)
        leave[states.final] = self.begin + cost
        for wave in reversed(waves[1:]):
            last = np.minimum(leave[wave], closes[wave])
            last[last < reached[wave]] = -UNREACHED
            leave[wave] = last
            for kind in range(kinds):
                action, origin = states.entered_by[kind, wave], states.entered_from[kind, wave]
                start = np.minimum(last, latest[action]) - ticks[action]
                start[start < earliest[action]] = -UNREACHED
                leave[origin] = np.maximum(leave[origin], start)  # no state is left twice by one kind
            leave[count] = -UNREACHED
        starts = np.full_like(earliest, UNREACHED)
        ends = np.full_like(latest, -UNREACHED)
        for kind in range(kinds):
            action = states.entered_by[kind]
            start = np.maximum(reached[states.entered_from[kind]], earliest[action])
            end = np.minimum(leave[:-1], latest[action])
            possible = start + ticks[action] <= end
            np.minimum.at(starts, action[possible], start[possible])
            np.maximum.at(ends, action[possible], end[possible])
        counted = np.append(self.counted.ravel(), False)
        if (starts[counted] >= UNREACHED).any():
            return False
        np.maximum(earliest, starts, out=earliest, where=counted)
        np.minimum(latest, ends, out=latest, where=counted)
        return True


def propagation_bound(states: Propagation, low: int, high: int, deadline_s: float) -> int:
    """The largest refuted cost plus one in [low, high], where `low` is a bound and `high` the cost of a schedule. Tries
    `high - 1` first, which alone can prove the schedule optimal, then halves the rest."""
    if low >= high or perf_counter() > deadline_s:
        return low
    if states.possible_times(high - 1, deadline_s) is None:
        return high
    while high - low > 1 + low // 100_000 and perf_counter() < deadline_s:
        middle = (low + high) // 2
        if states.possible_times(middle - 1, deadline_s) is None:
            low = middle
        else:
            high = middle
    return low
