"""What else a rank might have run while it waited.

Takes   the spans of a rank, what it holds and may hold.
Gives   for a gap between two actions, the later actions of the rank that would have run in it.
Raises  nothing.
Source  ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zbfx.plan import Action, CostTable, Kind, Span, parts
from zbfx.timing.critical import Spans
from zbfx.timing.sources import Sources

Curve = Sequence[tuple[float, float]]  # (seconds, bytes held from then on)
SLACK = 1e-9  # of a time


class Filling(NamedTuple):
    """A later action that might have run from `start_s` to `end_s`, or, where it does not fit, but for the limit."""

    start_s: float
    end_s: float
    action: Action
    fits: bool


def ready_times(sources: Sources, ranks: Spans) -> Mapping[Action, float]:
    """When all that an action needs had arrived on its rank."""
    ends = {part: span.end_s for row in ranks for span in row for part in parts(span.action)}
    return {
        span.action: max(
            (
                *(ends[found] for found in sources.of_stage(span.action) if found in ends),
                *(ends[found] + lag_s for found, lag_s in sources.elsewhere(span.action) if found in ends),
                0.0,
            )
        )
        for row in ranks
        for span in row
    }


class Filler:
    """Finds what might have run in the gaps of a rank, asked in their order. An action fills one gap."""

    def __init__(
        self,
        costs: CostTable,
        spans: Sequence[Span],
        ready_s: Mapping[Action, float],
        held: Curve,
        limit: float | None,
    ) -> None:
        self.costs, self.spans, self.ready_s, self.limit = costs, spans, ready_s, limit
        self.times, self.held = [time for time, _ in held], [size for _, size in held]
        lines: dict[tuple[Kind, int], list[int]] = defaultdict(list)
        for index, span in enumerate(spans):
            lines[span.action.kind, span.action.stage].append(index)
        self.lines = list(lines.values())  # the spans of one kind and stage, in order
        self.next = [0] * len(self.lines)

    def runs_in(self, index: int, start_s: float, end_s: float) -> Iterator[Filling]:
        """One after the other, what comes after span `index`, had its inputs, and would have ended by `end_s`."""
        blocked: dict[int, int] = {}  # line -> how many of its actions the limit has kept out of this gap
        while True:
            found = [
                (begin_s, line, later)
                for line, later in self.candidates(index, blocked)
                for begin_s in [max(start_s, self.ready_s[self.spans[later].action])]
                if begin_s + self.seconds(later) <= end_s * (1 + SLACK)
            ]
            if not found:
                return
            begin_s, line, later = min(found)
            stop_s = min(end_s, begin_s + self.seconds(later))
            if stop_s <= begin_s:
                return  # what takes no time fills none
            fits = self.fits(begin_s, later)
            yield Filling(begin_s, stop_s, self.spans[later].action, fits)
            start_s = stop_s
            if fits:
                self.next[line] += 1
            else:
                blocked[line] = blocked.get(line, 0) + 1

    def candidates(self, index: int, blocked: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """The next action of each line that comes after span `index`: the line, and the index of its span."""
        for line, members in enumerate(self.lines):
            while self.next[line] < len(members) and members[self.next[line]] <= index:
                self.next[line] += 1
            position = self.next[line] + blocked.get(line, 0)
            if position < len(members):
                yield line, members[position]

    def seconds(self, index: int) -> float:
        return self.spans[index].end_s - self.spans[index].start_s

    def fits(self, begin_s: float, index: int) -> bool:
        """Whether the limit leaves room for the action from `begin_s` until it did run. If so, that room is taken."""
        action, cost = self.spans[index].action, self.costs.stages[self.spans[index].action.stage]
        grows = float(cost.saved_bytes) if action.kind is Kind.F else 0.0
        if self.limit is None or not grows:
            return True
        first = max(0, bisect_right(self.times, begin_s) - 1)
        last = bisect_right(self.times, self.spans[index].start_s * (1 - SLACK))
        if max(self.held[first:last], default=0.0) + grows > self.limit * (1 + SLACK):
            return False
        self.held[first:last] = [size + grows for size in self.held[first:last]]
        return True
