"""`python -m zbfx`: plan, show and compare schedules from a table of costs, and check the pipeline of a model.

Exit status: 0 done, 2 a mistake in the request (one message on stderr), 130 interrupted, 141 the reader of the output
went away.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.console import Console
from rich.table import Table

from zbfx.cli_check import add_check
from zbfx.costs.tables import read_costs
from zbfx.errors import ZbfxError
from zbfx.schedule import plan
from zbfx.schedule.orders.registry import names
from zbfx.schedule.schedule import Schedule
from zbfx.show.chrome_trace import chrome_trace
from zbfx.show.text import amount, coloured_grid, summary
from zbfx.timing.limits import limit_per_rank

FAILED, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
LEAST_WIDTH = 40  # characters: a narrower grid shows nothing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        options = parser().parse_args(arguments)
        options.command(options)
        sys.stdout.flush()
    except (ZbfxError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # What is still buffered must not raise again when the interpreter closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        print(f"zbfx: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("zbfx: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="zbfx", description="Plan, draw and compare pipeline schedules.")
    commands = root.add_subparsers(title="commands", required=True, metavar="command")

    planning = commands.add_parser("plan", help="order F, B and W on every rank, with a proven lower bound")
    add_problem(planning)
    planning.add_argument("--schedule", default="auto", help="a schedule's name (default: auto, the best that fits)")
    planning.add_argument("--json", action="store_true", help="print the plan as JSON")
    planning.set_defaults(command=plan_command)

    showing = commands.add_parser("show", help="draw a schedule in the terminal or into a file")
    add_problem(showing)
    showing.add_argument("--schedule", default="auto", help="a schedule's name (default: auto, the best that fits)")
    showing.add_argument(
        "--columns", choices=("time", "step"), default="time", help="seconds to scale, or one cell each"
    )
    showing.add_argument("--width", type=width, help=f"characters, {LEAST_WIDTH} or more (default: the terminal's)")
    showing.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    showing.add_argument("--html", type=Path, metavar="FILE", help="write a page; hovering shows action and times")
    showing.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    showing.set_defaults(command=show_command)

    comparing = commands.add_parser("compare", help="a table of all schedules")
    add_problem(comparing)
    comparing.add_argument("--json", action="store_true", help="print the rows as JSON")
    comparing.set_defaults(command=compare_command)
    add_check(commands)
    return root


def add_problem(command: argparse.ArgumentParser) -> None:
    """The arguments that say what to plan."""
    command.add_argument("--costs", type=Path, required=True, metavar="FILE", help="cost table, JSON")
    command.add_argument("--microbatches", type=positive(int), required=True, metavar="M")
    command.add_argument(
        "--mem-limit", metavar="LIMIT", help="per rank, in the unit of m_b, or a multiple of 1F1B's: 2x"
    )
    command.add_argument(
        "--budget", type=positive(float), default=5.0, metavar="SECONDS", help="time to search (default: 5)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the search (default: 0)")


def positive(kind: type[int] | type[float]) -> Any:
    """An argparse type: a number above zero."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not value > 0 or value == math.inf:
            raise argparse.ArgumentTypeError(f"expected a number above 0; found {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


def width(text: str) -> int:
    """An argparse type: a width that a grid has room in."""
    if int(text) < LEAST_WIDTH:
        raise argparse.ArgumentTypeError(f"a grid takes {LEAST_WIDTH} characters or more; found {text}")
    return int(text)


def solve(options: argparse.Namespace, name: str) -> Schedule:
    costs = read_costs(options.costs)
    try:
        limit_per_rank(costs, options.mem_limit)
    except ZbfxError as error:  # which speaks of bytes, a unit that these costs may not have
        raise ZbfxError(
            f"--mem-limit is a number above 0 in the unit of m_b, or a multiple of what 1F1B needs, like 2x; found "
            f"{options.mem_limit!r}"
        ) from error
    return plan(
        costs,
        options.microbatches,
        schedule=name,
        mem_limit=options.mem_limit,
        budget_s=options.budget,
        seed=options.seed,
    )


def figures(schedule: Schedule) -> dict[str, Any]:
    """The figures of a plan under their names in the JSON output; times and memory in the units of the cost table."""
    return {
        "schedule": schedule.name,
        "iteration_time": schedule.iteration_s,
        "bubble_rate": schedule.bubble_rate,
        "peak_memory": list(schedule.peak_bytes),
        "lower_bound": schedule.lower_bound_s,
        "gap": schedule.gap if math.isfinite(schedule.gap) else None,
        "seconds": schedule.search_s,
    }


def plan_command(options: argparse.Namespace) -> None:
    schedule = solve(options, options.schedule)
    if options.json:
        ranks = [
            [{"action": str(span.action), "start": span.start_s, "end": span.end_s} for span in spans]
            for spans in schedule.spans
        ]
        print(json.dumps(figures(schedule) | {"ranks": ranks}))
        return
    for rank, order in enumerate(schedule.ranks):
        print(f"rank {rank}:", " ".join(map(str, order)))
    print(summary(schedule))
    print("peak memory per rank:", ", ".join(amount(peak, schedule) for peak in schedule.peak_bytes))
    for note in schedule.notes:
        print(note)


def show_command(options: argparse.Namespace) -> None:
    schedule = solve(options, options.schedule)
    chrome = partial(chrome_trace, schedule)
    drawings = ((options.svg, schedule.svg), (options.html, schedule.html), (options.trace, chrome))
    files = [(path, draw) for path, draw in drawings if path is not None]
    for path, draw in files:
        try:
            path.write_text(draw())
        except OSError as error:
            raise ZbfxError(f"cannot write {path}: {error.strerror}") from error
    if not files:
        columns = options.width or max(LEAST_WIDTH, get_terminal_size((120, 24)).columns)
        Console().print(coloured_grid(schedule, columns, options.columns), soft_wrap=True, end="")


def compare_command(options: argparse.Namespace) -> None:
    plans: list[Schedule] = []
    refused: dict[str, ZbfxError] = {}
    for name in names():
        try:
            plans.append(solve(options, name))
        except ZbfxError as error:
            refused[name] = error
    if not plans:
        raise refused["auto"]
    if options.json:
        rows = [figures(schedule) for schedule in plans]
        print(json.dumps(rows + [{"schedule": name, "error": str(reason)} for name, reason in refused.items()]))
        return
    table = Table("schedule", "iteration time", "bubble rate", "peak memory", "lower bound", "gap", "seconds")
    for column in table.columns[1:]:
        column.justify = "right"
    for schedule in plans:
        table.add_row(*cells(schedule))
    Console(width=max(100, get_terminal_size((120, 24)).columns)).print(table)
    for name, reason in refused.items():
        print(f"{name}: {str(reason).splitlines()[0]}")


def cells(schedule: Schedule) -> tuple[str, ...]:
    gap = f"{schedule.gap:.2%}" if math.isfinite(schedule.gap) else "-"
    return (
        schedule.name,
        f"{schedule.iteration_s:.6g}",
        f"{schedule.bubble_rate:.5f}",
        amount(max(schedule.peak_bytes), schedule),
        f"{schedule.lower_bound_s:.6g}",
        "0, optimal" if schedule.gap == 0 else gap,
        f"{schedule.search_s:.2f}",
    )
