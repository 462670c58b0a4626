"""The planner's result: a timetable with methods that draw it.

Takes   the fields of a `Timetable`.
Gives   the rank x time grid as text, SVG, HTML and Chrome trace.
Raises  what writing a file raises.
Source  ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from shutil import get_terminal_size

from zbfx.documents import write_text
from zbfx.plan import Timetable
from zbfx.show.chrome_trace import chrome_trace
from zbfx.show.page import Subject, page
from zbfx.show.svg import svg
from zbfx.show.text import grid


@dataclass(frozen=True)
class Schedule(Timetable):
    """Per rank an order of actions, timed, checked, with a lower bound: a `Timetable` that draws itself."""

    def __str__(self) -> str:
        """The rank x time grid in characters, as wide as the terminal."""
        return grid(self, width=get_terminal_size((120, 24)).columns)

    def svg(self) -> str:
        """The grid as an SVG document."""
        return svg(self)

    def html(self) -> str:
        """A self-contained page: the timeline to zoom into, why ranks idle, memory (`docs/report.md`)."""
        return page(Subject(self))

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return svg(self)

    def trace(self, path: str | PathLike[str]) -> None:
        """Write the schedule to `path` in Chrome's trace format."""
        write_text(path, chrome_trace(self))
