"""The measured timeline of one step: start and end of every action on every rank, on one clock, beside the plan."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from zbfx.plan import Action, Kind, Span
from zbfx.schedule.schedule import Schedule
from zbfx.show.svg import comparison


@dataclass(frozen=True)
class Gap:
    """Idle time of a rank before an action: `cause` is what the action waited for."""

    rank: int
    before: Action
    idle_s: float
    cause: str


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
    def gaps(self) -> tuple[Gap, ...]:
        """Every idle gap, longest first. A gap that ends less than the edge's time after the action that it waits for
        has ended is that dependency's; any other is the rank's own: launching, memory, or communication."""
        ends = {span.action: span.end_s for spans in self.spans for span in spans}
        found = []
        for rank, spans in enumerate(self.spans):
            previous_s = 0.0
            for span in spans:
                if span.start_s > previous_s:
                    found.append(Gap(rank, span.action, span.start_s - previous_s, self.cause(span, previous_s, ends)))
                previous_s = max(previous_s, span.end_s)
        return tuple(sorted(found, key=lambda gap: -gap.idle_s))

    def svg(self) -> str:
        """The measured step beside its plan, as an SVG document."""
        return comparison(self.schedule, self.spans)

    def cause(self, span: Span, idle_from_s: float, ends: dict[Action, float]) -> str:
        action, costs = span.action, self.schedule.costs
        sources = [
            Action(Kind.F if action.kind is Kind.F else Kind.B, other, action.microbatch)
            for edge in costs.edges
            for other, own in ((edge.source, edge.target), (edge.target, edge.source))
            if own == action.stage and (other < own) == (action.kind is Kind.F) and action.kind is not Kind.W
        ]
        late = [source for source in sources if ends.get(source, 0.0) > idle_from_s]
        if late:
            latest = max(late, key=lambda source: ends[source])
            return f"waits for {latest}, which ended {1e3 * (ends[latest] - idle_from_s):.3f} ms into the gap"
        return "nothing it depends on is late: launching or communication"


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
