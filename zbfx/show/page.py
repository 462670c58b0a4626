"""A schedule as one self-contained page: timelines to zoom into, why ranks idle, memory, the cut, programs.

Takes   a `Subject`: a schedule, and what else is known of it.
Gives   HTML. Timelines are drawn in the reader's browser, from data on the page; all else is plain HTML.
Raises  nothing.
Source  ours; `assets/d3.min.js` is d3 7.9.2 (ISC licence, `assets/d3.LICENSE`), which zooms, pans and draws axes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from zbfx.plan import CostTable, Timetable
from zbfx.show.explain import Account
from zbfx.show.palette import FILLS, IDLE_FILLS, LIMIT_LINE, MEMORY_FILL
from zbfx.show.svg import differ
from zbfx.show.text import summary
from zbfx.show.units import PREFIXES, amount, duration, is_real
from zbfx.timing.critical import Spans, critical_path
from zbfx.timing.fillers import Curve
from zbfx.timing.idle import Cause, memory_of
from zbfx.timing.simulate import simulate

MOST_PROGRAMS = 400_000  # characters; longer ones are told by their order of actions
MOST_DRAWN = 75_000  # actions of all schedules; those after that are in the table alone
Cells = Sequence[str]


@dataclass(frozen=True)
class CutEdge:
    """What stages send each other for one microbatch: values forward, gradients back, in bytes."""

    source: int
    target: int
    forward_bytes: int
    backward_bytes: int
    names: tuple[str, ...]  # of the values


@dataclass(frozen=True)
class Subject:
    """What a page is about: a schedule, and, where they are known, a measured step, the cut and the ranks' programs;
    and other schedules for the same costs."""

    schedule: Timetable
    measured: Spans | None = None
    cut: tuple[CutEdge, ...] = ()
    programs: tuple[str, ...] = ()
    compared: tuple[Timetable, ...] = ()


def page(subject: Subject) -> str:
    """A page that needs no other file, and no network."""
    schedule, planned = subject.schedule, Account.of_plan(subject.schedule)
    measured = None if subject.measured is None else Account.of_step(schedule, subject.measured)
    others = [Account.of_plan(other) for other in subject.compared]
    drawn = others[: max(0, MOST_DRAWN // max(1, sum(map(len, schedule.ranks))) - 1)]
    views = [view("plan", planned, measured, longest([planned, *drawn]), with_memory=True)]
    views += [view(str(index), other, None, longest([planned, *drawn])) for index, other in enumerate(drawn)]
    programs = subject.programs if sum(map(len, subject.programs)) <= MOST_PROGRAMS else orders(schedule)
    data = json.dumps(constants(schedule) | {"views": views, "programs": programs}, separators=(",", ":"))
    data = data.replace("<", r"\u003c")  # nothing in it ends the script
    name = escape(schedule.name)
    sections = [
        f"<h1>{name}</h1><p>{escape(summary(schedule))}</p>",
        f'<p class="limits">{escape(str(planned))}</p>',
        said_of_step(planned, measured),
        CONTROLS,
        keys(),
        '<div class="view" id="view-plan"><canvas></canvas></div>',
        f"<h2>Idle time by cause</h2>{idle_table(planned)}",
        "" if measured is None else f"<h3>Measured</h3>{idle_table(measured)}",
        memory_table(schedule),
        comparison_part([planned, *others], drawn) if others else "",
        cut_part(subject.cut, schedule.costs),
        program_part(programs),
        notes_part(schedule.notes),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{asset('page.css')}</style></head><body>\n" + "\n".join(filter(None, sections)) + "\n"
        f'<div id="tip"></div>\n<script type="application/json" id="data">{data}</script>\n'
        f"<script>{asset('d3.min.js')}</script>\n<script>\n{asset('page.js')}</script></body></html>\n"
    )


def asset(name: str) -> str:
    return files("zbfx.show").joinpath("assets", name).read_text()


CONTROLS = (
    '<div class="tools"><button data-zoom="2">+</button><button data-zoom="0.5">&minus;</button>'
    '<button data-zoom="0">all</button><label><input type="checkbox" id="path" checked> critical path</label>'
    '<label><input type="checkbox" id="messages"> messages</label>'
    '<span class="hint">drag to pan, ctrl or shift and the wheel to zoom, hover for times and causes</span></div>'
)


def constants(schedule: Timetable) -> dict[str, Any]:
    """What all views of a page share."""
    costs = schedule.costs
    chunks = [costs.stages_of(rank).index(stage) for stage, rank in enumerate(costs.placement)]
    return {
        "real": is_real(schedule),
        "units": PREFIXES if is_real(schedule) else ((1.0, ""),),
        "fills": FILLS,
        "causes": [{"name": cause, "fill": fill} for cause, fill in IDLE_FILLS.items()],
        "memory_fill": MEMORY_FILL,
        "limit_line": LIMIT_LINE,
        "opacity": [max(0.4, 1 - 0.3 * chunk) for chunk in chunks],
        "stages_each": 1 if costs.rank_count == len(costs.stages) else 2,
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "forward": edge.forward_s is not None,
                "backward": edge.backward_s is not None,
            }
            for edge in costs.edges
        ],
    }


def longest(accounts: Iterable[Account]) -> float:
    return max((span.end_s for account in accounts for row in account.spans for span in row), default=0.0)


def view(
    key: str, planned: Account, measured: Account | None, planned_s: float, *, with_memory: bool = False
) -> dict[str, Any]:
    """One picture: a lane per rank, or two where a step was measured. Times are indices into `times`; a clock is the
    time that fills the picture."""
    schedule, accounts = planned.schedule, [planned, *([measured] if measured else [])]
    clocks = [planned_s]
    if measured is not None:
        measured_s = longest([measured])
        clocks = [planned_s, measured_s] if differ(planned_s, measured_s) else [max(planned_s, measured_s)] * 2
    times = sorted({time for account in accounts for time in times_of(account)})
    index_of = {time: index for index, time in enumerate(times)}
    curves, guests = memory_of(schedule), dict(schedule.beside)
    limits = schedule.mem_limit
    lanes = []
    for rank in range(len(planned.spans)):
        for clock, account in enumerate(accounts):
            spans, idle = account.spans[rank], account.idle[rank]
            name = f"rank {rank}" if measured is None else f"{('plan', 'step')[clock]} {rank}"
            lanes.append(
                {
                    "name": name,
                    "rank": rank,
                    "clock": clock,
                    "actions": " ".join(str(span.action) for span in spans),
                    "start": [index_of[span.start_s] for span in spans],
                    "end": [index_of[span.end_s] for span in spans],
                    "beside": [index for index, span in enumerate(spans) if span.action in guests],
                    "idle": {
                        "cause": [list(Cause).index(piece.cause) for piece in idle],
                        "start": [index_of[piece.start_s] for piece in idle],
                        "end": [index_of[piece.end_s] for piece in idle],
                        "before": " ".join(str(piece.before or "-") for piece in idle),
                        "because": " ".join(str(piece.because or "-") for piece in idle),
                    },
                    "memory": stepped(curves[rank]) if with_memory and clock == 0 else None,
                    "limit": float(limits[rank]) if limits is not None else None,
                }
            )
    most = max((*schedule.peak_bytes, *(limits or ())), default=0.0)
    paths = [
        " ".join(str(span.action) for span in critical_path(schedule.costs, account.spans)) for account in accounts
    ]
    return {
        "key": key,
        "name": schedule.name,
        "clocks": clocks,
        "times": times,
        "lanes": lanes,
        "most": float(most),
        "paths": [*paths, ""][:2],
    }


def times_of(account: Account) -> Iterator[float]:
    for spans, idle in zip(account.spans, account.idle, strict=True):
        yield from (time_s for span in spans for time_s in (span.start_s, span.end_s))
        yield from (time_s for piece in idle for time_s in (piece.start_s, piece.end_s))


def stepped(curve: Curve) -> dict[str, list[float]]:
    """A memory curve, where it changes."""
    kept = [point for point, after in zip(curve, [*curve[1:], (None, None)], strict=True) if point[0] != after[0]]
    return {"time": [time for time, _ in kept], "held": [held for _, held in kept]}


def orders(schedule: Timetable) -> tuple[str, ...]:
    """What stands for programs that are too long: the actions of each rank, in order."""
    return tuple(" ".join(map(str, order)) for order in schedule.ranks)


def said_of_step(planned: Account, measured: Account | None) -> str:
    if measured is None:
        return ""
    schedule, planned_s, measured_s = planned.schedule, longest([planned]), longest([measured])
    scales = ": each on its own scale" if differ(planned_s, measured_s) else ""
    return (
        f"<p>planned {duration(planned_s, schedule, 6)}, measured {duration(measured_s, schedule, 6)} from the first "
        f'start to the last end{scales}</p><p class="limits">measured: {escape(str(measured))}</p>'
    )


def keys() -> str:
    """The legend."""
    kinds = "".join(f'<span style="--fill:{fill}">{kind}</span>' for kind, fill in FILLS.items())
    causes = "".join(f'<span class="idle" style="--fill:{fill}">{cause}</span>' for cause, fill in IDLE_FILLS.items())
    return f'<div class="keys">{kinds} idle: {causes} <span style="--fill:{MEMORY_FILL}">memory held</span></div>'


def table(head: Cells, rows: Iterable[Cells], kind: str = "numbers") -> str:
    """A table of numbers, or one whose last column is "text"."""
    cells = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{cells}</tr>{body}</table></div>'


def idle_table(account: Account) -> str:
    """Per rank: busy and idle time, which add up to the iteration time, and idle time by cause."""
    schedule, rows = account.schedule, []
    for rank in range(len(account.spans)):
        found = account.idle_s(rank)
        idle_s = sum(found.values())
        shown = [duration(seconds, schedule) if seconds else "" for seconds in found.values()]
        longest_one = " (longest)" if rank == account.longest else ""
        busy, idle = duration(account.iteration_s - idle_s, schedule), duration(idle_s, schedule)
        rows.append([f"rank {rank}{longest_one}", busy, idle, *shown])
    return table(["", "busy", "idle", *map(str, Cause)], rows)


def memory_table(schedule: Timetable) -> str:
    limits = schedule.mem_limit
    rows = [
        [f"rank {rank}", amount(peak, schedule), amount(float(limits[rank]), schedule) if limits else "none"]
        for rank, peak in enumerate(schedule.peak_bytes)
    ]
    return f"<h2>Memory</h2>{table(['', 'peak', 'limit'], rows)}"


def comparison_part(accounts: Sequence[Account], drawn: Sequence[Account]) -> str:
    schedule = accounts[0].schedule  # which knows its units
    peaks = [simulate(a.schedule.costs, a.schedule.microbatches, a.schedule.ranks).peak_bytes for a in accounts]
    rows = [
        [
            account.schedule.name,
            duration(account.schedule.iteration_s, schedule, 6),
            f"{account.schedule.bubble_rate:.1%}",
            f"{account.idle_share:.1%}",
            amount(max(peak), schedule),
            str(account),
        ]
        for account, peak in zip(accounts, peaks, strict=True)
    ]
    head = ["schedule", "iteration time", "bubble rate", "idle", "peak memory by costs", "what limits it"]
    pictures = "".join(
        f'<div class="view" id="view-{index}"><h3>{escape(account.schedule.name)}</h3><canvas></canvas></div>'
        for index, account in enumerate(drawn)
    )
    return "<h2>Beside other schedules</h2>" + table(head, rows, "text") + pictures


def cut_part(cut: Sequence[CutEdge], costs: CostTable) -> str:
    if not cut:
        return ""
    rows = []
    for edge in cut:
        ranks = f"{costs.placement[edge.source]} to {costs.placement[edge.target]}"
        sizes = [f"{size:,}" if size else "" for size in (edge.forward_bytes, edge.backward_bytes)]
        rows.append([f"stage {edge.source} to {edge.target}", ranks, *sizes, ", ".join(edge.names)])
    head = ["", "ranks", "bytes forward", "bytes back", "values"]
    return "<h2>The cut</h2><p>What one microbatch sends.</p>" + table(head, rows, "text")


def notes_part(notes: Sequence[str]) -> str:
    return "<h2>Notes</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>" if notes else ""


def program_part(programs: Sequence[str]) -> str:
    if not programs:
        return ""
    choices = "".join(f'<option value="{rank}">rank {rank}</option>' for rank in range(len(programs)))
    return (
        f'<h2>Program</h2><select id="rank" aria-label="rank">{choices}</select>'
        f'<pre id="program">{escape(programs[0])}</pre>'
    )
