"""A schedule, and a measured step of it, in Chrome's trace format (chrome://tracing, ui.perfetto.dev): a process for
the plan and one for the step, in each a thread and a memory counter per rank, and an arrow for each message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from zbfx.plan import Span, Timetable, parts
from zbfx.timing.critical import Spans
from zbfx.timing.fillers import Curve
from zbfx.timing.idle import memory_of
from zbfx.timing.prologues import without_prologues
from zbfx.timing.sources import Sources
from zbfx.timing.two_streams import as_they_run

MICROSECONDS_PER_SECOND = 1e6

Event = dict[str, Any]


def chrome_trace(schedule: Timetable, measured: Spans | None = None) -> str:
    """The JSON text of a trace. Times are in microseconds; `args` of an action have its seconds to the last digit."""
    planned, curves = as_they_run(schedule), memory_of(schedule)
    events = [*process(schedule, 0, "plan", planned, curves)]
    if measured is not None:
        moved = [as_measured(curve, *rows) for curve, *rows in zip(curves, schedule.spans, measured, strict=True)]
        events += process(schedule, 1, "measured", measured, moved)
    return json.dumps({"traceEvents": events, "otherData": {"schedule": schedule.name}})


def process(schedule: Timetable, pid: int, name: str, ranks: Spans, curves: Sequence[Curve]) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{schedule.name}: {name}"}}
    for rank, (spans, curve) in enumerate(zip(ranks, curves, strict=True)):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": {"name": f"rank {rank}"}}
        for span in spans:
            yield slice_of(span) | {"pid": pid, "tid": rank}
        for time_s, held in curve:
            args = {"bytes": held}
            yield {"ph": "C", "name": f"memory of rank {rank}", "pid": pid, "ts": microseconds(time_s), "args": args}
    yield from arrows(schedule, pid, ranks)


def slice_of(span: Span) -> Event:
    return {
        "ph": "X",
        "name": str(span.action),
        "cat": span.action.kind.value,
        "ts": microseconds(span.start_s),
        "dur": microseconds(span.end_s - span.start_s),
        "args": {
            "stage": span.action.stage,
            "microbatch": span.action.microbatch,
            "start_s": span.start_s,
            "end_s": span.end_s,
        },
    }


def arrows(schedule: Timetable, pid: int, ranks: Spans) -> Iterator[Event]:
    """From each action to those of other ranks that take its results."""
    sources, number, ranks = Sources(schedule.costs), 0, without_prologues(ranks)
    made_by = {part: (rank, span) for rank, row in enumerate(ranks) for span in row for part in parts(span.action)}
    for rank, row in enumerate(ranks):
        for span in row:
            for found, _ in sources.elsewhere(span.action):
                if found not in made_by or made_by[found][0] == rank:
                    continue
                sender, made = made_by[found]
                number += 1
                shared = {"name": f"{made.action} to {span.action}", "cat": "message", "pid": pid, "id": number}
                # A flow ties the slices that its ends lie in: inside, for ends that meet belong to two slices.
                yield shared | {"ph": "s", "tid": sender, "ts": microseconds((made.start_s + made.end_s) / 2)}
                middle = microseconds((span.start_s + span.end_s) / 2)
                yield shared | {"ph": "f", "bp": "e", "tid": rank, "ts": middle}


def as_measured(curve: Curve, planned: Sequence[Span], measured: Sequence[Span]) -> Curve:
    """A planned memory curve on the clock of the measured step: each point moves with the action that it falls into."""
    at = {part: span for span in measured for part in parts(span.action)}
    moved = {0.0: 0.0}
    for span in planned:
        own = [at[part] for part in parts(span.action) if part in at]  # a W without parameters is in no program
        if own:
            moved.setdefault(span.start_s, own[0].start_s)
            moved[span.end_s] = own[-1].end_s
    anchors = sorted(moved)
    times = numpy.interp([time_s for time_s, _ in curve], anchors, [moved[time_s] for time_s in anchors])
    return [(float(time_s), held) for time_s, (_, held) in zip(times, curve, strict=True)]


def microseconds(seconds: float) -> float:
    return seconds * MICROSECONDS_PER_SECOND
