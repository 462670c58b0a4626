"""A lower bound by contradiction: assume a schedule costs at most C, shrink each action's possible times to nothing.

Takes   a `LinearPipeline`, a bound, the cost of a schedule, a deadline.
Gives   the largest refuted cost plus one; the windows of all actions in schedules of a cost.
Raises  nothing; None where the problem is too large for this bound.
Source  ours.

The argument. Stage i's first action is F0 at a fixed time h_i, so cost at most C means that everything on its rank lies
in [h_i, h_i + C]. Every action therefore has an earliest start and a latest end (its window), and two kinds of step
shrink windows without losing any schedule of cost at most C:

1. Along dependencies: an action starts no earlier than the earliest end of what it needs plus communication, and ends
   no later than the latest start of what needs it.
2. On one rank, exactly: kinds run in order of microbatches, so what a rank has done is a state (a, b, c), the numbers
   of its finished Fs, Bs and Ws, m >= a >= b >= c >= 0, with (a - b) M_B + (b - c) M_W <= M. The earliest time at which
   a state can be reached under the windows follows from its (at most three) predecessors, the latest time at which it
   can be left from its successors. Transitions whose earliest exceeds their latest time occur in no schedule; the
   others give each action's new window.

If a window or a rank's final state becomes empty, no schedule costs C or less. This holds whatever the other ranks do,
so it contains the arguments of `head_tail_bound`. Repeated until nothing changes, it also sees how one rank's lateness
bears on the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from zbfx.schedule.bounds.linear import LinearPipeline

Ints = NDArray[np.int64]

UNREACHED = 1 << 62
MOST_TICKS = 1 << 60  # sums of two times must stay below UNREACHED
MOST_STATES = 1_500_000


@dataclass(frozen=True)
class PossibleTimes:
    """Earliest starts and latest ends, indexed [kind, stage, microbatch]."""

    earliest: Ints
    latest: Ints


def state_count(pipe: LinearPipeline) -> int:
    """About how many states there are, without listing them."""
    per_stage = (
        sum(pipe.most_pending(i, flying) + 1 for flying in range(pipe.most_in_flight(i) + 1)) for i in pipe.stages
    )
    return (pipe.microbatches + 1) * sum(per_stage)


class Propagation:
    """The states of every rank, as arrays over all ranks at once, sorted by how many actions they have behind them."""

    @classmethod
    def of(cls, pipe: LinearPipeline, most_ticks: int) -> Propagation | None:
        """None where the problem is too large for this bound."""
        if most_ticks > MOST_TICKS or state_count(pipe) > MOST_STATES:
            return None
        return cls(pipe)

    def __init__(self, pipe: LinearPipeline) -> None:
        self.pipe = pipe
        m, p = pipe.microbatches, len(pipe.stages)
        self.ticks: Ints = np.array([pipe.forward, pipe.backward, pipe.weight], dtype=np.int64)
        self.begin: Ints = np.array([pipe.first_start(i) for i in pipe.stages], dtype=np.int64)
        rank, *done = self._states()
        total = done[0] + done[1] + done[2]
        order = np.argsort(total, kind="stable")
        rank, done = rank[order], [column[order] for column in done]
        self.wave = np.searchsorted(total[order], np.arange(3 * m + 2))
        count = len(rank)
        # Position of state (a, b, c) of a rank; `count` stands for "no such state". One row pads a - 1 and a + 1.
        flying, pending = done[0] - done[1], done[1] - done[2]
        shape = (p, m + 2, int(flying.max()) + 3, int(pending.max()) + 3)
        position = np.full(shape, count, dtype=np.int64)
        position[rank, done[0], flying, pending] = np.arange(count)
        steps = ((1, 1, 0), (0, -1, 1), (0, 0, -1))  # what F, B and W do to (a, a - b, b - c)
        self.after = [position[rank, done[0] + x, flying + y, pending + z] for x, y, z in steps]
        self.before = [position[rank, done[0] - x, flying - y, pending - z] for x, y, z in steps]
        nothing = 3 * p * m  # index of a dummy action
        self.entered_by = [
            np.where(self.before[k] < count, (k * p + rank) * m + np.maximum(done[k] - 1, 0), nothing) for k in range(3)
        ]
        self.left_by = [
            np.where(self.after[k] < count, (k * p + rank) * m + np.minimum(done[k], m - 1), nothing) for k in range(3)
        ]
        self.step_ticks = [self.ticks[k][rank] for k in range(3)]
        self.initial, self.final = position[np.arange(p), 0, 0, 0], position[np.arange(p), m, 0, 0]

    def _states(self) -> tuple[Ints, Ints, Ints, Ints]:
        """(rank, a, b, c) of all states."""
        pipe, m = self.pipe, self.pipe.microbatches
        columns: list[Ints] = []
        for i in pipe.stages:
            pairs = [
                (flying, pending)
                for flying in range(pipe.most_in_flight(i) + 1)
                for pending in range(pipe.most_pending(i, flying) + 1)
            ]
            flying, pending = np.array(pairs, dtype=np.int64).T
            a = np.arange(m + 1)[:, None]
            b = a - flying[None]
            c = b - pending[None]
            keep = np.nonzero(c >= 0)
            columns.append(np.stack([np.full(len(keep[0]), i), np.broadcast_to(a, c.shape)[keep], b[keep], c[keep]]))
        rank, a, b, c = np.concatenate(columns, axis=1)
        return rank, a, b, c

    def possible_times(self, cost: int, deadline_s: float = inf) -> PossibleTimes | None:
        """The windows of all actions in schedules of at most `cost` ticks. None: there are no such schedules."""
        m, p = self.pipe.microbatches, len(self.pipe.stages)
        earliest = np.full(3 * p * m + 1, UNREACHED, dtype=np.int64)
        latest = np.full(3 * p * m + 1, -UNREACHED, dtype=np.int64)
        early, late = earliest[:-1].reshape(3, p, m), latest[:-1].reshape(3, p, m)
        early[:], late[:] = self.begin[:, None], self.begin[:, None] + cost
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
        count = len(self.step_ticks[0])
        reached = np.full(count + 1, UNREACHED, dtype=np.int64)
        reached[self.initial] = self.begin
        for low, high in zip(self.wave[1:-1], self.wave[2:], strict=True):
            first = np.full(high - low, UNREACHED, dtype=np.int64)
            for kind in range(3):
                action = self.entered_by[kind][low:high]
                end = (
                    np.maximum(reached[self.before[kind][low:high]], earliest[action]) + self.step_ticks[kind][low:high]
                )
                end[end > latest[action]] = UNREACHED
                np.minimum(first, end, out=first)
            reached[low:high] = first
        if (reached[self.final] >= UNREACHED).any():
            return False
        left = np.full(count + 1, -UNREACHED, dtype=np.int64)
        left[self.final] = self.begin + cost
        for low, high in reversed(list(zip(self.wave[:-2], self.wave[1:-1], strict=True))):
            last = np.full(high - low, -UNREACHED, dtype=np.int64)
            for kind in range(3):
                action = self.left_by[kind][low:high]
                start = np.minimum(left[self.after[kind][low:high]], latest[action]) - self.step_ticks[kind][low:high]
                start[start < earliest[action]] = -UNREACHED
                np.maximum(last, start, out=last)
            last[last < reached[low:high]] = -UNREACHED
            left[low:high] = last
        starts = np.full_like(earliest, UNREACHED)
        ends = np.full_like(latest, -UNREACHED)
        for kind in range(3):
            action = self.left_by[kind]
            start = np.maximum(reached[:-1], earliest[action])
            end = np.minimum(left[self.after[kind]], latest[action])
            possible = start + self.step_ticks[kind] <= end
            np.minimum.at(starts, action[possible], start[possible])
            np.maximum.at(ends, action[possible], end[possible])
        if (starts[:-1] >= UNREACHED).any():
            return False
        np.maximum(earliest[:-1], starts[:-1], out=earliest[:-1])
        np.minimum(latest[:-1], ends[:-1], out=latest[:-1])
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
