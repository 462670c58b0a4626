"""The chain of actions that the iteration time follows from.

Takes   a cost table, and when every action ran, as planned or as measured.
Gives   the rank whose part of the step takes longest, and the actions that it waited for in the end.
Raises  nothing.
Source  ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zbfx.plan import CostTable, Span, parts
from zbfx.timing.prologues import without_prologues
from zbfx.timing.sources import Sources

Spans = Sequence[Sequence[Span]]  # per rank, sorted by start


def longest_rank(ranks: Spans) -> int:
    """The rank whose first start and last end are farthest apart; of several, the one that is busy for longest."""

    ranks = without_prologues(ranks)

    def extent(rank: int) -> tuple[float, float]:
        spans = ranks[rank]
        busy_s = sum(span.end_s - span.start_s for span in spans)
        return (max(span.end_s for span in spans) - spans[0].start_s, busy_s) if spans else (0.0, 0.0)

    return max(range(len(ranks)), key=extent)


def critical_path(costs: CostTable, ranks: Spans) -> tuple[Span, ...]:
    """The chain that ends with the last action of the longest rank, first to last. Each action waited for the one
    before it: the one that its rank ran before, or one whose result it needs, whichever let it start later."""
    sources, ranks = Sources(costs), without_prologues(ranks)
    made_by = {part: span for row in ranks for span in row for part in parts(span.action)}
    before = {later.action: sooner for row in ranks for sooner, later in pairwise(row)}
    path: list[Span] = []
    last = max(ranks[longest_rank(ranks)], key=lambda span: span.end_s, default=None)
    while last is not None:
        path.append(last)
        reasons = [(made_by[found], lag_s) for found, lag_s in sources.elsewhere(last.action) if found in made_by]
        reasons += [(before[last.action], 0.0)] if last.action in before else []
        earlier = [(span.end_s + lag_s, span) for span, lag_s in reasons if span.start_s < last.start_s]
        last = max(earlier, key=lambda reason: reason[0], default=(0.0, None))[1]
    return tuple(reversed(path))
