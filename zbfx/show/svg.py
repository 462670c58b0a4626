"""A schedule as an SVG picture: one lane per rank, time to the right, the memory each rank holds under its lane; and as
one self-contained HTML page: the picture, a tooltip with action and times, a table of figures.

`comparison` draws a measured step beside its plan. Every action is a `<rect>` with a `<title>` that names it and its
times, so viewers show both on hover.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from zbfx.plan import Kind, Span, Timetable
from zbfx.show.text import amount, labeller, summary
from zbfx.timing.simulate import simulate
from zbfx.timing.two_streams import as_they_run

FILLS = {Kind.F: "#6fa8dc", Kind.B: "#76d7c4", Kind.W: "#93c47d", Kind.BW: "#f0c05a"}
LANE_PX, MEMORY_PX, GAP_PX, LEFT_PX, HEAD_PX, CHARACTER_PX = 22, 16, 6, 64, 24, 6.2


def svg(schedule: Timetable, width_px: int = 1400) -> str:
    """A complete SVG document, `width_px` wide."""
    ranks = schedule.costs.rank_count
    height_px = HEAD_PX + ranks * (LANE_PX + MEMORY_PX + GAP_PX)
    scale = (width_px - LEFT_PX - 8) / schedule.makespan_s if schedule.makespan_s else 0.0
    curves = schedule.memory or simulate(schedule.costs, schedule.microbatches, schedule.ranks).memory
    most = max(schedule.peak_bytes, default=0.0)
    body = [f'<text x="4" y="15">{escape(summary(schedule))}</text>']
    for rank, (spans, curve) in enumerate(zip(schedule.spans, curves, strict=True)):
        top = HEAD_PX + rank * (LANE_PX + MEMORY_PX + GAP_PX)
        right = LEFT_PX + schedule.makespan_s * scale
        body.append(f'<text x="4" y="{top + 15}">rank {rank}</text>')
        body.append(f'<rect x="{LEFT_PX}" y="{top}" width="{right - LEFT_PX:.2f}" height="{LANE_PX}" fill="#f2f2f2"/>')
        body += [action_rect(schedule, span, top, scale) for span in spans]
        body.append(memory_area(curve, most, top + LANE_PX, scale, right, schedule.peak_bytes[rank]))
    return document(body, width_px, height_px)


def comparison(schedule: Timetable, measured: Sequence[Sequence[Span]], width_px: int = 1400) -> str:
    """Two lanes per rank on one scale: the plan, and below it what was measured. A W beside a B fills the lower half of
    its lane."""
    planned, guests = as_they_run(schedule), dict(schedule.beside)
    planned_s, measured_s = (max(span.end_s for spans in lanes for span in spans) for lanes in (planned, measured))
    scale = (width_px - LEFT_PX - 8) / max(planned_s, measured_s)
    body = [
        f'<text x="4" y="15">{escape(schedule.name)}: planned {planned_s:.6g} s, measured {measured_s:.6g} s '
        f"from the first start to the last end</text>"
    ]
    lanes = [
        (f"{kind} {rank}", lane[rank])
        for rank in range(schedule.costs.rank_count)
        for kind, lane in (("plan", planned), ("step", measured))
    ]
    for index, (name, spans) in enumerate(lanes):
        top = HEAD_PX + index * LANE_PX + (index // 2 + index) * GAP_PX / 2
        body.append(f'<text x="4" y="{top + 15}">{name}</text>')
        # Ws beside Bs come last: they are drawn over these.
        body += [action_rect(schedule, span, top, scale) for span in spans if span.action not in guests]
        beside = [span for span in spans if span.action in guests]
        body += [action_rect(schedule, span, top + LANE_PX / 2, scale, LANE_PX / 2) for span in beside]
    height_px = HEAD_PX + len(lanes) * (LANE_PX + GAP_PX)
    return document(body, width_px, height_px)


def document(body: Sequence[str], width_px: int, height_px: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height_px}" '
        f'viewBox="0 0 {width_px} {height_px}" font-family="monospace" font-size="11">\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def action_rect(schedule: Timetable, span: Span, top: float, scale: float, height_px: float = LANE_PX) -> str:
    """One action; later stages of a rank are drawn paler, its number appears where there is room."""
    action = span.action
    x, width = LEFT_PX + span.start_s * scale, (span.end_s - span.start_s) * scale
    depth = schedule.costs.stages_of(schedule.costs.placement[action.stage]).index(action.stage)
    label = labeller(schedule)(action)
    title = f"<title>{action}: {span.start_s:.6g} to {span.end_s:.6g}</title>"
    rect = (
        f'<rect class="action" data-microbatch="{action.microbatch}" x="{x:.2f}" y="{top}" width="{width:.2f}" '
        f'height="{height_px:g}" fill="{FILLS[action.kind]}" fill-opacity="{max(0.4, 1 - 0.3 * depth):.1f}" '
        f'stroke="#333" stroke-width="0.5">{title}</rect>'
    )
    if len(label) * CHARACTER_PX > width or height_px < LANE_PX:
        return rect
    middle = x + width / 2
    return rect + f'<text x="{middle:.2f}" y="{top + 15}" text-anchor="middle" pointer-events="none">{label}</text>'


def memory_area(
    curve: tuple[tuple[float, float], ...], most: float, top: float, scale: float, right: float, peak: float
) -> str:
    """A step curve of the bytes held, filled down to zero; `most` is the height of the strip."""
    bottom = top + MEMORY_PX
    points = [f"{LEFT_PX:.2f},{bottom:.2f}"]
    level = bottom
    for time, held in curve:
        x = LEFT_PX + time * scale
        points.append(f"{x:.2f},{level:.2f}")
        level = bottom - (held / most if most else 0.0) * (MEMORY_PX - 2)
        points.append(f"{x:.2f},{level:.2f}")
    points += [f"{right:.2f},{level:.2f}", f"{right:.2f},{bottom:.2f}"]
    title = f"<title>memory held, peak {amount(peak)}</title>"
    return f'<polygon class="memory" points="{" ".join(points)}" fill="#c9b3d9">{title}</polygon>'


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
    return sum(span.end_s - span.start_s for span in schedule.spans[rank])
