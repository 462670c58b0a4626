"""A schedule as an SVG picture: one lane per rank, time to the right, why the rank idles, and what it holds, below.

`comparison` draws a measured step beside its plan. Every action is a `<rect>` with a `<title>` that names it and its
times, so viewers show both on hover; `data-start` and `data-end` are the times to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from zbfx.plan import Action, Span, Timetable
from zbfx.show.explain import Account
from zbfx.show.palette import FILLS, IDLE_FILLS, LIMIT_LINE, MEMORY_FILL, opacity
from zbfx.show.text import labeller, summary
from zbfx.show.units import amount, duration, ticks, time_unit
from zbfx.timing.fillers import Curve
from zbfx.timing.idle import Idle, memory_of
from zbfx.timing.two_streams import as_they_run

LANE_PX, IDLE_PX, MEMORY_PX, GAP_PX, LEFT_PX, RIGHT_PX = 22, 5, 16, 6, 64, 60
LINE_PX, AXIS_PX, TICK_PX = 16, 18, 90  # TICK_PX: from one tick to the next, about
CHARACTER_PX, SMALL_PX = 6.2, 4.6  # of 11 px and of 8 px


@dataclass(frozen=True)
class Scale:
    """Seconds to pixels; `total_s` fills `width_px`."""

    schedule: Timetable
    total_s: float
    width_px: float

    def x(self, time_s: float) -> float:
        return LEFT_PX + (time_s / self.total_s * self.width_px if self.total_s else 0.0)

    def axis(self, top: float, bottom: float) -> Iterator[str]:
        """Ticks with numbers at `top`, lines down to `bottom`, and the unit."""
        size, unit = time_unit(self.total_s, self.schedule)
        for tick in ticks(self.total_s / size, int(self.width_px / TICK_PX)):
            x = self.x(tick * size)
            yield f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{top + 3:g}" y2="{bottom:g}" stroke="#ccc" stroke-width="0.5"/>'
            yield f'<text x="{x:.2f}" y="{top:g}" text-anchor="middle" fill="#555">{tick:.6g}</text>'
        yield f'<text x="4" y="{top:g}" fill="#555">{f"time, {unit}" if unit else "time"}</text>'


def svg(schedule: Timetable, width_px: int = 1400) -> str:
    """A complete SVG document, `width_px` wide."""
    account, spans = Account.of_plan(schedule), as_they_run(schedule)
    total_s = max((span.end_s for row in spans for span in row), default=0.0)
    scale = Scale(schedule, total_s, width_px - LEFT_PX - RIGHT_PX)
    curves, most = memory_of(schedule), max((*schedule.peak_bytes, *(schedule.mem_limit or ())), default=0.0)
    head = [summary(schedule), str(account)]
    step_px, first = LANE_PX + IDLE_PX + MEMORY_PX + GAP_PX, LINE_PX * (len(head) + 1) + AXIS_PX + 4
    height_px = first + step_px * len(spans)
    body = [*heading(head), *legend(LINE_PX * (len(head) + 1)), *scale.axis(first - 6, height_px - GAP_PX)]
    for rank, (row, curve) in enumerate(zip(spans, curves, strict=True)):
        top, limit = first + rank * step_px, float(schedule.mem_limit[rank]) if schedule.mem_limit else None
        body += lane(schedule, f"rank {rank}", row, top, scale)
        body += [idle_rect(piece, schedule, top + LANE_PX, scale) for piece in account.idle[rank]]
        body += memory_strip(schedule, curve, most, top + LANE_PX + IDLE_PX, scale, schedule.peak_bytes[rank], limit)
    return document(body, width_px, height_px)


def comparison(schedule: Timetable, measured: Sequence[Sequence[Span]], width_px: int = 1400) -> str:
    """Two lanes per rank: the plan, and below it what was measured. Both on one scale, unless one takes more than twice
    as long as the other. A W beside a B fills the lower half of its lane."""
    planned = as_they_run(schedule)
    totals = [max((span.end_s for row in lanes for span in row), default=0.0) for lanes in (planned, measured)]
    apart = differ(*totals)
    scales = [Scale(schedule, total if apart else max(totals), width_px - LEFT_PX - RIGHT_PX - 4) for total in totals]
    planned_s, measured_s = (duration(total, schedule, 6) for total in totals)
    head = [
        f"{schedule.name}: planned {planned_s}, measured {measured_s} from the first start to the last end"
        + (": each on its own scale" if apart else ""),
        f"measured: {Account.of_step(schedule, measured)}",
    ]
    pair_px, first = 2 * (LANE_PX + IDLE_PX) + GAP_PX, LINE_PX * (len(head) + 1) + AXIS_PX + 4
    last = first + pair_px * len(planned)
    body = [*heading(head), *legend(LINE_PX * (len(head) + 1)), *scales[0].axis(first - 6, last - GAP_PX)]
    body += scales[1].axis(last + LINE_PX - GAP_PX, last - GAP_PX) if apart else ()
    accounts = (Account.of_plan(schedule), Account.of_step(schedule, measured))
    for rank in range(len(planned)):
        for index, (name, account) in enumerate(zip(("plan", "step"), accounts, strict=True)):
            top = first + rank * pair_px + index * (LANE_PX + IDLE_PX)
            body += lane(schedule, f"{name} {rank}", account.spans[rank], top, scales[index])
            body += [idle_rect(piece, schedule, top + LANE_PX, scales[index]) for piece in account.idle[rank]]
    return document(body, width_px, last + (AXIS_PX if apart else 0))


def differ(planned_s: float, measured_s: float) -> bool:
    """Whether times differ so much that one scale would hide the shorter ones."""
    return max(planned_s, measured_s) > 2 * min(planned_s, measured_s)


def heading(lines: Sequence[str]) -> list[str]:
    return [f'<text x="4" y="{LINE_PX * (index + 1) - 3}">{escape(line)}</text>' for index, line in enumerate(lines)]


def legend(top: int) -> Iterator[str]:
    """A square and a name for every colour."""
    fills = [(str(kind), fill) for kind, fill in FILLS.items()]
    fills += [(f"idle: {cause}", fill) for cause, fill in IDLE_FILLS.items()]
    x = 4.0
    for name, fill in fills:
        yield f'<rect class="legend" x="{x:.1f}" y="{top}" width="10" height="10" fill="{fill}"/>'
        yield f'<text x="{x + 13:.1f}" y="{top + 9}">{name}</text>'
        x += 13 + CHARACTER_PX * len(name) + 14


def document(body: Sequence[str], width_px: int, height_px: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width_px}" height="{height_px:g}" '
        f'viewBox="0 0 {width_px} {height_px:g}" font-family="monospace" font-size="11" style="background: #fff">\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def lane(schedule: Timetable, name: str, spans: Sequence[Span], top: float, scale: Scale) -> Iterator[str]:
    """The actions of a rank. Ws beside Bs come last: they are drawn over these."""
    guests, label = dict(schedule.beside), labeller(schedule)
    yield f'<text x="4" y="{top + 15:g}">{name}</text>'
    right = scale.x(scale.total_s)
    yield f'<rect x="{LEFT_PX}" y="{top:g}" width="{right - LEFT_PX:.2f}" height="{LANE_PX}" fill="#f2f2f2"/>'
    for span in spans:
        if span.action not in guests:
            yield action_rect(schedule, span, label(span.action), top, LANE_PX, scale)
    for span in spans:
        if span.action in guests:
            yield action_rect(schedule, span, label(span.action), top + LANE_PX / 2, LANE_PX / 2, scale)


def action_rect(schedule: Timetable, span: Span, label: str, top: float, height_px: float, scale: Scale) -> str:
    """One action. Its label is drawn where there is room, else its microbatch, in small digits, where there is."""
    action, x = span.action, scale.x(span.start_s)
    width = scale.x(span.end_s) - x
    title = f"{action}: {duration(span.start_s, schedule, 6)} to {duration(span.end_s, schedule, 6)}"
    rect = (
        f'<rect class="action" data-action="{action}" data-start="{span.start_s!r}" data-end="{span.end_s!r}" '
        f'x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{height_px:g}" fill="{FILLS[action.kind]}" '
        f'fill-opacity="{opacity(action, schedule.costs):.1f}" stroke="#333" stroke-width="0.5">'
        f"<title>{title}</title></rect>"
    )
    text, size = fitting(label, action, width) if height_px == LANE_PX else ("", 0)
    if not text:
        return rect
    return (
        f'{rect}<text x="{x + width / 2:.2f}" y="{top + 15:g}" font-size="{size}" text-anchor="middle" '
        f'pointer-events="none">{text}</text>'
    )


def fitting(label: str, action: Action, width_px: float) -> tuple[str, int]:
    """What fits into an action's width, and its size in pixels."""
    if len(label) * CHARACTER_PX <= width_px:
        return label, 11
    number = str(action.microbatch)
    return (number, 8) if len(number) * SMALL_PX <= width_px else ("", 0)


def idle_rect(piece: Idle, schedule: Timetable, top: float, scale: Scale) -> str:
    left, right = scale.x(piece.start_s), min(scale.x(piece.end_s), scale.x(scale.total_s))
    why = f" before {piece.before}" if piece.before else ""
    why += f" ({piece.because})" if piece.because else ""
    return (
        f'<rect class="idle" data-cause="{piece.cause}" data-start="{piece.start_s!r}" data-end="{piece.end_s!r}" '
        f'x="{left:.2f}" y="{top:g}" width="{max(0.0, right - left):.2f}" height="{IDLE_PX - 1}" '
        f'fill="{IDLE_FILLS[piece.cause]}"><title>idle {duration(piece.idle_s, schedule)}: {piece.cause}{why}</title>'
        f"</rect>"
    )


def memory_strip(
    schedule: Timetable, curve: Curve, most: float, top: float, scale: Scale, peak: float, limit: float | None
) -> Iterator[str]:
    """A step curve of the bytes held, filled down to zero, with the limit as a line; `most` is the strip's height."""
    bottom, right = top + MEMORY_PX, scale.x(scale.total_s)

    def y(held: float) -> float:
        return bottom - (held / most if most else 0.0) * (MEMORY_PX - 2)

    points, level = [f"{LEFT_PX:.2f},{bottom:.2f}"], bottom
    for time, held in curve:
        x = scale.x(time)
        points.append(f"{x:.2f},{level:.2f}")
        level = y(held)
        points.append(f"{x:.2f},{level:.2f}")
    points += [f"{right:.2f},{level:.2f}", f"{right:.2f},{bottom:.2f}"]
    title = f"memory held, peak {amount(peak, schedule)}"
    title += "" if limit is None else f", limit {amount(limit, schedule)}"
    yield f'<polygon class="memory" points="{" ".join(points)}" fill="{MEMORY_FILL}"><title>{title}</title></polygon>'
    yield f'<text x="{right + 3:.2f}" y="{bottom - 3:g}" font-size="9">{amount(peak, schedule)}</text>'
    if limit is not None:
        yield (
            f'<line class="limit" x1="{LEFT_PX}" x2="{right:.2f}" y1="{y(limit):.2f}" y2="{y(limit):.2f}" '
            f'stroke="{LIMIT_LINE}" stroke-dasharray="4 3"/>'
        )
