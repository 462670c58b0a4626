"""When prologues run: those of a rank's stages one after the other, before its first action.

Takes   a timetable, or spans of ranks.
Gives   the spans of prologues in the plan; spans without prologues.
Raises  nothing. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbfx.plan import Action, Kind, Span, Timetable


def prologue_spans(schedule: Timetable, rank: int) -> tuple[Span, ...]:
    """The prologues of a rank's stages that take time, as late as its first action allows. Times leave room for
    them."""
    spans = schedule.spans[rank]
    if not spans:
        return ()
    found, at_s = list[Span](), spans[0].start_s - schedule.costs.prologue_s(rank)
    for stage in (stage for stage in schedule.costs.stages_of(rank) if schedule.costs.stages[stage].prologue_s):
        end_s = at_s + float(schedule.costs.stages[stage].prologue_s)
        found.append(Span(Action(Kind.P, stage, 0), at_s, end_s))
        at_s = end_s
    return tuple(found)


def without_prologues(ranks: Sequence[Sequence[Span]]) -> tuple[Sequence[Span], ...]:
    """The spans of the actions that ranks order. A prologue waits for nothing, and nothing else could take its
    place."""
    return tuple(
        row if not row or row[0].action.kind is not Kind.P else [span for span in row if span.action.kind is not Kind.P]
        for row in ranks
    )
