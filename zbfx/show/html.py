"""A schedule as one self-contained HTML page: the SVG picture, a tooltip with action and times, a table of figures."""

from __future__ import annotations

from html import escape

from zbfx.plan import Timetable
from zbfx.show.svg import FILLS, svg
from zbfx.show.text import amount

STYLE = """
body { font: 14px sans-serif; margin: 1.5em; } figure { margin: 0; overflow-x: auto; }
table { border-collapse: collapse; margin-top: 1em; } td, th { padding: 2px 10px; text-align: right; }
#tip { position: fixed; display: none; background: #222; color: #fff; padding: 3px 7px; font: 12px monospace; }
.same { stroke: #c00; stroke-width: 2; }
"""

# Moves each <title> into a tooltip that appears at once, and outlines the actions of the same microbatch.
SCRIPT = """
const tip = document.getElementById("tip");
for (const shape of document.querySelectorAll("svg .action, svg .memory")) {
  const title = shape.querySelector("title"), text = title.textContent;
  title.remove();
  const same = document.querySelectorAll(`[data-microbatch="${shape.dataset.microbatch}"]`);
  shape.addEventListener("mousemove", event => {
    tip.textContent = text;
    tip.style.cssText = `display: block; left: ${event.clientX + 14}px; top: ${event.clientY + 14}px`;
  });
  shape.addEventListener("mouseenter", () => same.forEach(other => other.classList.add("same")));
  shape.addEventListener("mouseleave", () => {
    tip.style.display = "none";
    same.forEach(other => other.classList.remove("same"));
  });
}
"""


def html(schedule: Timetable) -> str:
    """A page that needs no other file."""
    name = escape(schedule.name)
    legend = " ".join(f'<span style="background:{fill}">&nbsp;{kind}&nbsp;</span>' for kind, fill in FILLS.items())
    rows = "".join(
        f"<tr><td>{rank}</td><td>{busy_s(schedule, rank):.6g}</td><td>{amount(peak, schedule)}</td></tr>"
        for rank, peak in enumerate(schedule.peak_bytes)
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in schedule.notes)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        f"<style>{STYLE}</style></head><body><h1>{name}</h1><p>{legend}</p>\n<figure>{svg(schedule)}</figure>\n"
        f"<table><tr><th>rank</th><th>busy</th><th>peak memory</th></tr>{rows}</table><ul>{notes}</ul>\n"
        f'<div id="tip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def busy_s(schedule: Timetable, rank: int) -> float:
    """Seconds in which the rank computes."""
    return sum(span.end_s - span.start_s for span in schedule.spans[rank])
