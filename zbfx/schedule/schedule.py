"""The planner's result: a timetable that draws itself."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from shutil import get_terminal_size

from zbfx.plan import Timetable
from zbfx.show.chrome_trace import chrome_trace
from zbfx.show.html import html
from zbfx.show.svg import svg
from zbfx.show.text import grid


@dataclass(frozen=True)
class Schedule(Timetable):
    """A timetable with its pictures."""

    def __str__(self) -> str:
        """The rank x time grid in characters, as wide as the terminal."""
        return grid(self, width=get_terminal_size((120, 24)).columns)

    def svg(self) -> str:
        """The grid as an SVG document."""
        return svg(self)

    def html(self) -> str:
        """The grid as a self-contained page; hovering shows action and times."""
        return html(self)

    def trace(self, path: str | PathLike[str]) -> None:
        """Write the schedule to `path` in Chrome's trace format."""
        Path(path).write_text(chrome_trace(self))
