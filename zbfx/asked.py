"""What the command line asks for: a plan of costs, or the pipeline of a model.

Takes   the options of a command (`add_problem`, `add_schedule`).
Gives   a `Schedule`, or a pipeline.
Raises  `ZbfxError` for requests that do not fit together, and as planning and compiling do.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zbfx.costs.tables import read_costs
from zbfx.errors import ZbfxError
from zbfx.named_model import EXAMPLE, named_arguments
from zbfx.schedule import improve, plan
from zbfx.schedule.orders.written import placement_of_orders, read_file
from zbfx.schedule.schedule import Schedule
from zbfx.timing.limits import limit_per_rank

BUDGET_S = 5.0


def add_problem(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", nargs="?", metavar="FILE.py:FUNCTION", help=f"{EXAMPLE}; or --costs")
    command.add_argument("--stages", type=int, help="pipeline ranks of a model (default: what it says, or 2)")
    command.add_argument(
        "--costs",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="cost table, JSON; several that differ in placement: the best over all of them",
    )
    command.add_argument("--microbatches", type=positive(int), metavar="M", help="(a model's: what it says, or 8)")
    command.add_argument(
        "--mem-limit",
        metavar="LIMIT",
        help="of every rank, in the unit of m_b, or a multiple of 1F1B's: 2x; or of each rank, with commas between",
    )
    command.add_argument(
        "--budget", type=positive(float), default=BUDGET_S, metavar="SECONDS", help="time to search (default: 5)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the search (default: 0)")


def add_schedule(command: argparse.ArgumentParser) -> None:
    asked = command.add_mutually_exclusive_group()
    asked.add_argument("--schedule", help="a schedule's name (default: auto, the best that fits; a model's own)")
    asked.add_argument(
        "--order", type=Path, metavar="FILE", help="an order per rank: what plan --json printed, or a CSV of torch"
    )
    command.add_argument("--improve", action="store_true", help="search from that schedule or order")


def positive(kind: type[int] | type[float]) -> Any:
    """An argparse type: a number above zero."""

    def parse(text: str) -> int | float:
        value = kind(text)
        if not value > 0 or value == math.inf:
            raise argparse.ArgumentTypeError(f"expected a number above 0; found {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


def check_problem(options: argparse.Namespace) -> None:
    """Raises `ZbfxError` unless there is a model, or costs and a number of microbatches."""
    if (options.target is None) == (options.costs is None):
        found = "neither" if options.target is None else "both"
        raise ZbfxError(
            f"{options.name} takes a model (FILE.py:FUNCTION), or --costs and --microbatches; found {found}"
        )
    if options.target is None and options.microbatches is None:
        raise ZbfxError(f"{options.name} --costs takes --microbatches; found none")
    if options.target is not None and (options.budget, options.seed) != (BUDGET_S, 0):
        raise ZbfxError("--budget and --seed are of plans from --costs; a model's pipeline is planned as compile does")


def solve(options: argparse.Namespace, schedule: Any, placement: Sequence[int] | None = None) -> Schedule:
    """The plan of a schedule. `placement` stands where a cost table names none."""
    tables = [read_costs(path, placement) for path in options.costs]
    limit = limit_of(options)
    try:
        for costs in tables:
            limit_per_rank(costs, limit)
    except ZbfxError as error:  # which speaks of bytes, a unit that these costs may not have
        raise ZbfxError(
            f"--mem-limit is a number above 0 in the unit of m_b, or a multiple of what 1F1B needs, like 2x, or "
            f"{costs.rank_count} numbers with commas between, one per rank; found {options.mem_limit!r}"
        ) from error
    return plan(
        tables, options.microbatches, schedule=schedule, mem_limit=limit, budget_s=options.budget, seed=options.seed
    )


def limit_of(options: argparse.Namespace) -> Any:
    """One limit, one for each rank, or None."""
    several = (options.mem_limit or "").split(",")
    return several if len(several) > 1 else options.mem_limit


def replanned(schedule: Schedule, limit: Any, name: str) -> Schedule:
    """Another schedule for the costs of one."""
    return plan(schedule.costs, schedule.microbatches, schedule=name, mem_limit=limit)


def solve_asked(options: argparse.Namespace) -> Schedule:
    """The plan of the schedule that the command line asks for: of costs, or of a model."""
    check_problem(options)
    if options.target is not None:
        return compiled_model(options).schedule
    orders = None if options.order is None else read_file(options.order)
    schedule = (options.schedule or "auto") if orders is None else orders
    placement = None if orders is None else placement_of_orders(orders)
    return solve(options, improve(schedule) if options.improve else schedule, placement)


def compiled_model(options: argparse.Namespace) -> Any:
    from zbfx.pipeline import compile

    tell("compiling")
    return compile(**model_arguments(options))


def model_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Those that the named function returns, with what the command line asks for in their place."""
    chosen = {
        "stages": options.stages,
        "microbatches": options.microbatches,
        "mem_limit": limit_of(options),
        "schedule": options.schedule if options.order is None else read_file(options.order),
    }
    asked = {name: value for name, value in chosen.items() if value is not None}
    arguments = {"stages": 2, "microbatches": 8, **named_arguments(options.name, options.target), **asked}
    return arguments | ({"schedule": improve(arguments.get("schedule", "auto"))} if options.improve else {})


def tell(progress: str) -> None:
    if speaks():
        print(f"zbfx: {progress}", file=sys.stderr)


def speaks() -> bool:
    """Whether this process is the one, of those that torchrun has started, that speaks to the user."""
    return int(os.environ.get("RANK", "0")) == 0
