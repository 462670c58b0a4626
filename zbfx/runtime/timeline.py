"""The measured timeline of one step: start and end of every action on every rank, on one clock, beside the plan."""

from __future__ import annotations

import time
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from zbfx.documents import write_text
from zbfx.plan import Action, Kind, Span
from zbfx.schedule.schedule import Schedule
from zbfx.show.chrome_trace import chrome_trace
from zbfx.show.svg import comparison
from zbfx.timing.idle import Idle, idle_times


@dataclass(frozen=True, repr=False)
class Profile:
    """Measured spans per rank, in order, from the common start of a step, and the schedule that planned them."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    def __repr__(self) -> str:
        return f"Profile({self.schedule.name}: {self.makespan_s:.6g} s, planned {self.schedule.makespan_s:.6g} s)"

    @property
    def makespan_s(self) -> float:
        return max(span.end_s for spans in self.spans for span in spans)

    @property
    def seconds(self) -> dict[tuple[Kind, int], float]:
        """The mean seconds of an action, by kind and stage."""
        found: dict[tuple[Kind, int], dict[Action, float]] = {}
        for span in (span for spans in self.spans for span in spans):
            each = found.setdefault((span.action.kind, span.action.stage), {})
            each[span.action] = each.get(span.action, 0.0) + span.end_s - span.start_s  # a W may run in pieces
        return {part: sum(each.values()) / len(each) for part, each in found.items()}

    @property
    def idle(self) -> tuple[tuple[Idle, ...], ...]:
        """Per rank, in order, its idle time in pieces, each with its cause (`docs/report.md`)."""
        return idle_times(self.schedule.costs, self.spans)

    def svg(self) -> str:
        """The measured step beside its plan, as an SVG document."""
        return comparison(self.schedule, self.spans)

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.svg()

    def trace(self, path: str | PathLike[str]) -> None:
        """Write the plan and the measured step to `path` in Chrome's trace format."""
        write_text(path, chrome_trace(self.schedule, self.spans))


class Recorder:
    """Marks the start and end of actions on one rank's device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[Action, Any, Any]] = []
        self.start: Any = None

    def begin(self) -> None:
        """Start the clock, at a moment that all ranks share."""
        self.marks.clear()
        self.restart()

    def restart(self) -> None:
        """Start the clock anew for marks that a graph writes again."""
        self.start = self.mark()

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def spans(self) -> list[Span]:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return [Span(action, self.seconds(start), self.seconds(end)) for action, start, end in self.marks]

    def seconds(self, mark: Any) -> float:
        return float(mark - self.start if self.device.type != "cuda" else self.start.elapsed_time(mark) / 1e3)
