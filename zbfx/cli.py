"""`python -m zbfx`: plan, show and compare schedules from a table of costs; report on one, or on a model's pipeline;
check that pipeline.
Exit status: 0 done, 2 a mistake in the request (one message on stderr), 130 interrupted, 141 the reader of the output
went away."""

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

from zbfx import __version__
from zbfx.asked import (
    add_problem,
    add_schedule,
    check_problem,
    compiled_model,
    limit_of,
    model_arguments,
    positive,
    replanned,
    solve,
    solve_asked,
    speaks,
    tell,
)
from zbfx.documents import refuse_unwritable, write_text
from zbfx.errors import WrongPlacement, ZbfxError
from zbfx.named_model import EXAMPLE, named_arguments
from zbfx.schedule import names
from zbfx.schedule.others import others
from zbfx.schedule.schedule import Schedule
from zbfx.show.chrome_trace import chrome_trace
from zbfx.show.explain import Account
from zbfx.show.page import Subject, page
from zbfx.show.text import coloured_grid, summary
from zbfx.show.units import amount, duration

FAILED, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
LEAST_WIDTH, MOST_WIDTH = 40, 100_000  # characters: a narrower grid shows nothing, a wider one fills memory


def main(arguments: Sequence[str] | None = None) -> int:
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
    root.add_argument("--version", action="version", version=f"zbfx {__version__}")
    commands = root.add_subparsers(title="commands", required=True, metavar="command")

    planning = commands.add_parser("plan", help="order F, B and W on every rank, with a proven lower bound")
    add_problem(planning)
    add_schedule(planning)
    planning.add_argument("--json", action="store_true", help="print the plan as JSON")
    planning.set_defaults(command=plan_command, name="plan")

    showing = commands.add_parser("show", help="draw a schedule in the terminal or into a file")
    add_problem(showing)
    add_schedule(showing)
    showing.add_argument(
        "--columns", choices=("time", "step"), default="time", help="seconds to scale, or one cell each"
    )
    showing.add_argument("--width", type=width, help=f"characters, {LEAST_WIDTH} or more (default: the terminal's)")
    showing.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")
    showing.add_argument("--html", type=Path, metavar="FILE", help="write a page; hovering shows action and times")
    showing.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    showing.set_defaults(command=show_command, name="show")

    comparing = commands.add_parser("compare", help="a table of all schedules")
    add_problem(comparing)
    comparing.add_argument("--json", action="store_true", help="print the rows as JSON")
    comparing.set_defaults(command=compare_command, name="compare", schedule=None, order=None, improve=False)
    add_report(commands)
    add_profile(commands)
    add_check(commands)
    add_playground(commands)
    return root


def width(text: str) -> int:
    """An argparse type: a width that a grid has room in."""
    if int(text) < LEAST_WIDTH:
        raise argparse.ArgumentTypeError(f"a grid takes {LEAST_WIDTH} characters or more; found {text}")
    if int(text) > MOST_WIDTH:
        raise argparse.ArgumentTypeError(f"a grid takes {MOST_WIDTH} characters at most; found {text}")
    return int(text)


def figures(schedule: Schedule) -> dict[str, Any]:
    """The figures of a plan under their names in the JSON output; times and memory in the units of the cost table."""
    return {
        "schedule": schedule.name,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.costs.placement),
        "mem_limit": None if schedule.mem_limit is None else list(schedule.mem_limit),
        "iteration_time": schedule.iteration_s,
        "planned_time": schedule.planned_s,
        "bubble_rate": schedule.bubble_rate,
        "peak_memory": list(schedule.peak_bytes),
        "lower_bound": schedule.lower_bound_s,
        "gap": schedule.gap if math.isfinite(schedule.gap) else None,
        "seconds": schedule.search_s,
        "notes": list(schedule.notes),
    }


def plan_command(options: argparse.Namespace) -> None:
    schedule = solve_asked(options)
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
    schedule = solve_asked(options)
    chrome = partial(chrome_trace, schedule)
    drawings = ((options.svg, schedule.svg), (options.html, schedule.html), (options.trace, chrome))
    files = [(path, draw) for path, draw in drawings if path is not None]
    for path, draw in files:
        write_text(path, draw())
        print(f"wrote {path}")
    if not files:
        columns = options.width or max(LEAST_WIDTH, get_terminal_size((120, 24)).columns)
        Console().print(coloured_grid(schedule, columns, options.columns), soft_wrap=True, end="")


def compare_command(options: argparse.Namespace) -> None:
    check_problem(options)
    solved = partial(solve, options)
    own: Schedule | None = None
    if options.target is not None:
        own = compiled_model(options).schedule
        solved = partial(replanned, own, limit_of(options))
    plans: list[Schedule] = []
    refused: dict[str, ZbfxError] = {}
    for name in names():
        try:
            plans.append(solved(name))
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
        table.add_row(*cells(schedule, own or schedule))
    Console(width=max(100, get_terminal_size((120, 24)).columns)).print(table)
    for name, refusal in refused.items():
        print(f"{name}: {why_not(name, refusal, own)}")


def why_not(name: str, refusal: ZbfxError, own: Schedule | None) -> str:
    """Why a schedule is no row of the table, in a line. A model has no cost table whose placement could be set."""
    if own is not None and isinstance(refusal, WrongPlacement):
        return f"{refusal.reason}. The model is cut for it by --schedule {name}"
    return str(refusal).splitlines()[0]


def cells(schedule: Schedule, own: Schedule) -> tuple[str, ...]:
    """A row of figures, in the units of `own`: a model's schedule has seconds and bytes."""
    gap = f"{schedule.gap:.2%}" if math.isfinite(schedule.gap) else "-"
    return (
        schedule.name,
        duration(schedule.iteration_s, own, 6),
        f"{schedule.bubble_rate:.5f}",
        amount(max(schedule.peak_bytes), own),
        duration(schedule.lower_bound_s, own, 6),
        "0, optimal" if schedule.gap == 0 else gap,
        f"{schedule.search_s:.2f}",
    )


def add_report(commands: Any) -> None:
    reporting = commands.add_parser("report", help="write a page on a schedule, or on the pipeline of your model")
    add_problem(reporting)
    add_schedule(reporting)
    reporting.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="(report.html)")
    reporting.add_argument("--profile", action="store_true", help="run a step in this process, and show it too")
    reporting.add_argument(
        "--compare", nargs="*", metavar="NAME", help="schedules to compare with (default: all by hand that fit)"
    )
    reporting.set_defaults(command=report_command, name="report")


def report_command(options: argparse.Namespace) -> None:
    """Writes the page and says where; what takes long is said on stderr."""
    check_problem(options)
    refuse_unwritable(options.out)
    if options.target is not None:
        text = page_of_model(options)
    elif options.profile:
        raise ZbfxError("report --costs runs nothing; found --profile, which runs a model")
    else:
        schedule = solve_asked(options)
        text = page(Subject(schedule, compared=others(schedule, options.compare)))
    if not speaks():
        return
    write_text(options.out, text)
    print(f"wrote {options.out} ({len(text.encode()) / 1e6:.1f} MB)")


def page_of_model(options: argparse.Namespace) -> str:
    from zbfx.measured_step import measured_step  # brings torch, which the planning commands do without
    from zbfx.report import subject

    if options.profile:
        pipe, profile = measured_step(model_arguments(options), tell)
    else:
        pipe, profile = compiled_model(options), None
    tell("planning other schedules, and drawing")
    return page(subject(pipe.compiled, profile, options.compare))


def add_profile(commands: Any) -> None:
    profiling = commands.add_parser(
        "profile", help="run a step of your model's pipeline, here or under torchrun, and say what each rank did when"
    )
    profiling.add_argument("target", metavar="FILE.py:FUNCTION", help=f"{EXAMPLE}; or module:function")
    profiling.add_argument("--stages", type=int, help="pipeline ranks (default: what it says, or 2; torchrun: all)")
    profiling.add_argument("--microbatches", type=positive(int), metavar="M", help="(default: what it says, or 8)")
    profiling.add_argument("--html", type=Path, metavar="FILE", help="write the page of report, with the measured step")
    profiling.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of it beside its plan")
    profiling.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    profiling.set_defaults(
        command=profile_command, name="profile", schedule=None, order=None, mem_limit=None, improve=False
    )


def profile_command(options: argparse.Namespace) -> None:
    for path in (options.html, options.svg, options.trace):
        if path is not None:
            refuse_unwritable(path)
    from zbfx.measured_step import measured_step

    pipe, profile = measured_step(model_arguments(options), tell)
    if not speaks():
        return
    account = Account.of_step(profile.schedule, profile.spans)
    print(f"{profile!r}; measured: {account}")
    for rank in range(len(profile.spans)):
        found = {str(cause): seconds for cause, seconds in account.idle_s(rank).items() if seconds}
        said = ", ".join(f"{cause} {duration(seconds, profile.schedule)}" for cause, seconds in found.items())
        print(f"rank {rank} idles: {said or 'never'}")
    draw = {
        options.html: lambda path: pipe.report(path, profile=profile),
        options.svg: lambda path: write_text(path, profile.svg()),
        options.trace: profile.trace,
    }
    for path, write in draw.items():
        if path is not None:
            write(path)
            print(f"wrote {path}")


def add_playground(commands: Any) -> None:
    playing = commands.add_parser("playground", help="a page on this machine with a slider for each cost")
    playing.add_argument("--port", type=int, default=8765, help="(default: 8765; 0: any that is free)")
    playing.set_defaults(command=playground_command)


def playground_command(options: argparse.Namespace) -> None:
    """Serves until it is interrupted."""
    from zbfx.playground import LOOPBACK, server

    with server(options.port) as serving:
        print(f"http://{LOOPBACK}:{serving.server_address[1]} (Ctrl-C ends it)", flush=True)
        serving.serve_forever()


def add_check(commands: Any) -> None:
    checking = commands.add_parser(
        "check", help="compare the gradients of your model's F, B and W with those of its joint graph"
    )
    checking.add_argument("target", metavar="FILE.py:FUNCTION", help=f"{EXAMPLE}; or module:function")
    checking.add_argument("--stages", type=int, help="pipeline ranks (default: what the function says, or 2)")
    checking.add_argument("--seed", type=int, default=0, help="of the random data (default: 0)")
    checking.add_argument(
        "--programs", action="store_true", help="print what is proven of the programs of all ranks; runs nothing"
    )
    checking.set_defaults(command=check_command)


def check_command(options: argparse.Namespace) -> None:
    """Prints the report; raises `ZbfxError` if a gradient is lost, doubled or different. With `--programs`, prints what
    holds for the programs, and raises if a rule is broken."""
    import zbfx  # brings torch, which the planning commands do without

    given = named_arguments("check", options.target)
    if options.programs:
        stages = {} if options.stages is None else {"stages": options.stages}
        print(proof_of(zbfx.compile(**{"stages": 2, "microbatches": 8, **given, **stages, "check": False})))
        return
    arguments = {"stages": 2, "microbatches": 2, "schedule": "1f1b", **given, "check": False}
    if options.stages is not None:
        arguments["stages"] = options.stages
    report = zbfx.check(zbfx.compile(**arguments), seed=options.seed)
    if not report:
        raise ZbfxError(f"the pipeline is wrong: {report}")
    print(report)


def proof_of(pipe: Any) -> Any:
    """What holds for the programs of a pipeline."""
    from zbfx.verify.proof import Proof

    return Proof.of(pipe.programs, pipe.schedule, [memory.peak_bytes for memory in pipe.memory])
