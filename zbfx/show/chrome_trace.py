"""A schedule in Chrome's trace format (chrome://tracing, ui.perfetto.dev): a thread and a memory counter per rank."""

from __future__ import annotations

import json
from typing import Any

from zbfx.plan import Timetable
from zbfx.timing.simulate import simulate

MICROSECONDS_PER_SECOND = 1e6


def chrome_trace(schedule: Timetable) -> str:
    """The JSON text of a trace."""
    curves = simulate(schedule.costs, schedule.microbatches, schedule.ranks).memory
    events: list[dict[str, Any]] = []
    for rank, (spans, curve) in enumerate(zip(schedule.spans, curves, strict=True)):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        events += [
            {
                "ph": "X",
                "name": str(span.action),
                "cat": span.action.kind.value,
                "pid": 0,
                "tid": rank,
                "ts": span.start_s * MICROSECONDS_PER_SECOND,
                "dur": (span.end_s - span.start_s) * MICROSECONDS_PER_SECOND,
                "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
            }
            for span in spans
        ]
        events += [
            {
                "ph": "C",
                "name": f"memory of rank {rank}",
                "pid": 0,
                "ts": time * MICROSECONDS_PER_SECOND,
                "args": {"bytes": held},
            }
            for time, held in curve
        ]
    return json.dumps({"traceEvents": events, "otherData": {"schedule": schedule.name}})
