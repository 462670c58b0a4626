"""A schedule as an SVG picture: one lane per rank, time to the right, the memory each rank holds under its lane.

Every action is a `<rect>` with a `<title>` that names it and its times, so viewers show both on hover.
"""

from __future__ import annotations

from html import escape

from zbfx.plan import Kind, Schedule, Span
from zbfx.schedule.simulate import simulate
from zbfx.show.text import amount, labeller, summary

FILLS = {Kind.F: "#6fa8dc", Kind.B: "#76d7c4", Kind.W: "#93c47d", Kind.BW: "#f0c05a"}
LANE_PX, MEMORY_PX, GAP_PX, LEFT_PX, HEAD_PX, CHARACTER_PX = 22, 16, 6, 64, 24, 6.2


def svg(schedule: Schedule, width_px: int = 1400) -> str:
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
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height_px}" '
        f'viewBox="0 0 {width_px} {height_px}" font-family="monospace" font-size="11">\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def action_rect(schedule: Schedule, span: Span, top: float, scale: float) -> str:
    """One action; later stages of a rank are drawn paler, its number appears where there is room."""
    action = span.action
    x, width = LEFT_PX + span.start_s * scale, (span.end_s - span.start_s) * scale
    depth = schedule.costs.stages_of(schedule.costs.placement[action.stage]).index(action.stage)
    label = labeller(schedule)(action)
    title = f"<title>{action}: {span.start_s:.6g} to {span.end_s:.6g}</title>"
    rect = (
        f'<rect class="action" data-microbatch="{action.microbatch}" x="{x:.2f}" y="{top}" width="{width:.2f}" '
        f'height="{LANE_PX}" fill="{FILLS[action.kind]}" fill-opacity="{max(0.4, 1 - 0.3 * depth):.1f}" '
        f'stroke="#333" stroke-width="0.5">{title}</rect>'
    )
    if len(label) * CHARACTER_PX > width:
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
