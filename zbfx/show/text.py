"""A schedule as characters: one row per rank, time to the right, the memory each rank holds under it.

    rank 0 |F0F1..............B0-W0---|       an action begins with its kind and microbatch; "-" runs on, "." is idle,
    rank 1 |.........F0B0-F1B1-W0---W1|       a fused backward ends in "=": BW0=====
    time   |0         10        20           in the unit of the costs, or in seconds

Ranks that hold several stages name the stage too: F0.1. Below stand what limits the schedule, and its figures.

`columns="time"` draws seconds to scale, and the memory. `columns="step"` draws one cell for each action, as if all
actions took one second and messages no time, and wraps the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Literal

from zbfx.plan import Action, CostTable, Edge, Kind, StageCost, Timetable
from zbfx.show.explain import Account
from zbfx.show.palette import FILLS
from zbfx.show.units import amount, duration, ticks, time_unit
from zbfx.timing.idle import memory_of
from zbfx.timing.prologues import prologue_spans
from zbfx.timing.simulate import simulate

if TYPE_CHECKING:
    from rich.text import Text

Columns = Literal["time", "step"]
Segment = tuple[str, Kind | None]  # a run of characters and the kind that gives its colour
TextLine = list[Segment]

IDLE = "."
TICK = 10  # characters from one tick to the next, about
LEAST_FILLED = 0.7  # of the width
BARS = " ▁▂▃▄▅▆▇█"
COLOURS = {kind: f"#000000 on {fill}" for kind, fill in FILLS.items()}  # terminals of fewer colours take the nearest


def grid(schedule: Timetable, width: int = 120, columns: Columns = "time") -> str:
    """The grid, the memory curves, what limits the schedule, and its figures. Rows are at most `width` characters
    wide."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in picture(schedule, width, columns))


def coloured_grid(schedule: Timetable, width: int = 120, columns: Columns = "time") -> Text:
    """`grid` with a colour per kind, for a rich console."""
    from rich.text import Text

    text = Text(no_wrap=True)
    for line in picture(schedule, width, columns):
        for characters, kind in line:
            text.append(characters, COLOURS[kind] if kind else None)
        text.append("\n")
    return text


def picture(schedule: Timetable, width: int, columns: Columns) -> list[TextLine]:
    """The lines of the grid in segments of one kind each."""
    said: list[TextLine] = [[(str(Account.of_plan(schedule)), None)], [(summary(schedule), None)]]
    if columns == "step":
        return [*step_rows(schedule, width), *said]
    return [*time_rows(schedule, width), axis_row(schedule, width), *memory_rows(schedule, width), *said]


def summary(schedule: Timetable) -> str:
    """The figures of a schedule in one line."""
    parts = [
        f"{schedule.costs.rank_count} ranks, {schedule.microbatches} microbatches",
        f"iteration time {duration(schedule.iteration_s, schedule, 6)}",
        f"bubble rate {schedule.bubble_rate:.4f}",
    ]
    once_s = max(map(schedule.costs.prologue_s, range(schedule.costs.rank_count)))
    if once_s:
        parts.insert(2, f"prologues {duration(once_s, schedule)}")
    if schedule.lower_bound_s:
        verdict = f"gap {schedule.gap:.2%}" if schedule.gap else "met: proven optimal"
        parts.append(f"lower bound {duration(schedule.lower_bound_s, schedule, 6)} ({verdict})")
    return f"{schedule.name}: " + ", ".join(parts)


def labeller(schedule: Timetable) -> Callable[[Action], str]:
    """`F3` where every rank holds one stage, `F0.3` otherwise."""
    if schedule.costs.rank_count == len(schedule.costs.stages):
        return lambda action: f"{action.kind}{action.microbatch}"
    return str


def rank_name(rank: int, schedule: Timetable) -> str:
    return f"rank {rank:>{len(str(schedule.costs.rank_count - 1))}} |"


def time_rows(schedule: Timetable, width: int) -> list[TextLine]:
    label = labeller(schedule)
    scale = characters_per_second(schedule, width)
    rows = []
    for rank, ordered in enumerate(schedule.spans):
        spans = (*prologue_spans(schedule, rank), *ordered)
        line: TextLine = [(rank_name(rank, schedule), None)]
        drawn = 0
        for span in spans:
            begin, end = round(span.start_s * scale), round(span.end_s * scale)
            if begin > drawn:
                line.append((IDLE * (begin - drawn), None))
            line.append((time_cell(label(span.action), span.action.kind, end - begin), span.action.kind))
            drawn = end
        line.append((IDLE * (round(schedule.makespan_s * scale) - drawn) + "|", None))
        rows.append(line)
    return rows


def axis_row(schedule: Timetable, width: int) -> TextLine:
    """Round times, each where its column begins, and the unit."""
    scale, (size, unit) = characters_per_second(schedule, width), time_unit(schedule.makespan_s, schedule)
    lead = rank_name(0, schedule)
    line = f"{f'time {unit}'.strip():{len(lead) - 1}}|"
    last = len(lead) + round(schedule.makespan_s * scale)
    for tick in ticks(schedule.makespan_s / size, max(1, (last - len(lead)) // TICK)):
        label, column = f"{tick:.6g}", len(lead) + round(tick * size * scale)
        if column + len(label) <= max(last, len(lead) + 1):
            line = line.ljust(column) + label
    return [(line, None)]


def time_cell(label: str, kind: Kind, length: int) -> str:
    """The label where there is room, else one letter. The trailing "=" tells a fused BW from a B and a W."""
    fused = kind is Kind.BW
    text = label if len(label) + fused <= length else label[0]
    return text.ljust(length, "=" if fused else "-")[:length]


def characters_per_second(schedule: Timetable, width: int) -> float:
    """The scale that fits `width`: a whole number, so that equal actions look equal, unless much room would be left."""
    room = max(1, width - len(rank_name(0, schedule)) - 1)
    scale = room / schedule.makespan_s if schedule.makespan_s else 0.0
    return float(int(scale)) if int(scale) >= LEAST_FILLED * scale else scale


def step_rows(schedule: Timetable, width: int) -> list[TextLine]:
    label = labeller(schedule)
    spans = simulate(unit_costs(schedule.costs), schedule.microbatches, schedule.ranks).spans
    steps = [[round(span.start_s) for span in row] for row in spans]
    count = 1 + max((step for row in steps for step in row), default=-1)
    cell = 1 + max((len(label(action)) for order in schedule.ranks for action in order), default=1)
    names = [rank_name(rank, schedule) for rank in range(schedule.costs.rank_count)]
    per_band = max(1, (width - len(names[0]) - 1) // cell)
    lines: list[TextLine] = []
    for first in range(0, count, per_band):
        last = min(first + per_band, count)
        for name, order, row in zip(names, schedule.ranks, steps, strict=True):
            actions = dict(zip(row, order, strict=True))
            lines.append([(name, None), *step_cells(actions, range(first, last), cell, label), ("|", None)])
        if last < count:
            lines.append([])
    return lines


def unit_costs(costs: CostTable) -> CostTable:
    """One second for every action and none for a message: the shape of a schedule without its costs."""
    edges = tuple(
        Edge(e.source, e.target, None if e.forward_s is None else 0, None if e.backward_s is None else 0)
        for e in costs.edges
    )
    return CostTable((StageCost(1, 1, 1, backward_s=1),) * len(costs.stages), edges, costs.placement)


def step_cells(
    actions: dict[int, Action], steps: Iterable[int], cell: int, label: Callable[[Action], str]
) -> Iterable[Segment]:
    for step in steps:
        if step in actions:
            text = label(actions[step])
            yield text, actions[step].kind
            yield " " * (cell - len(text)), None
        else:
            yield IDLE.ljust(cell), None


def memory_rows(schedule: Timetable, width: int) -> list[TextLine]:
    """Per rank a bar for each column: the most it holds in that stretch of time, on one scale for all ranks."""
    scale = characters_per_second(schedule, width)
    count = round(schedule.makespan_s * scale)
    curves = memory_of(schedule)
    most = max(schedule.peak_bytes, default=0.0)
    where = schedule.peak_bytes.index(most) if schedule.peak_bytes else 0
    lines: list[TextLine] = [[(f"memory held, a full bar is the peak: {amount(most, schedule)} on rank {where}", None)]]
    for rank, curve in enumerate(curves):
        shares = [held / most if most else 0.0 for held in column_maxima(curve, count, scale)]
        bars = "".join(BARS[ceil(share * (len(BARS) - 1) - 1e-9)] for share in shares)
        lines.append([(f"{rank_name(rank, schedule)}{bars}|", None)])
    return lines


def column_maxima(curve: Sequence[tuple[float, float]], count: int, scale: float) -> list[float]:
    """The largest value of a step function, given as (time, value from then on), in each of `count` columns."""
    maxima = [0.0] * count
    ends = [time for time, _ in curve[1:]] + [count / scale if scale else 0.0]
    for (begin, held), end in zip(curve, ends, strict=True):
        for column in range(int(begin * scale), min(count, max(int(begin * scale) + 1, round(end * scale)))):
            maxima[column] = max(maxima[column], held)
    return maxima
