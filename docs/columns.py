"""Docstrings for the site: columns of "name   what it is" become lists, which Markdown would run together."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

ENTRY = re.compile(r"^(\S+(?:, \S+)*) {2,}(\S.*)$")
FURTHER = re.compile(r"^ {5,}(\S.*)$")


def listed(text: str) -> str:
    """A docstring in which every line of a column is an item of a list, with the lines that continue it."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if entry := ENTRY.match(line):
            if not inside:
                lines.append("")
            lines.append(f"- `{entry[1]}`: {entry[2]}")
            inside = True
        elif inside and (further := FURTHER.match(line)):
            lines.append(f"  {further[1]}")
        else:
            lines.append(line)
            inside = False
    return "\n".join(lines)


class Columns(Extension):  # type: ignore[misc]
    """What griffe calls for each object that it reads."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
