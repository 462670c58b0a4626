"""Runs the integer-programming solver in a child process under a hard limit of wall-clock time.

Takes   an `IntegerProgram` and seconds.
Gives   an `Answer`, which is a claim: callers simulate and check it.
Raises  `SolverFailed`, and nothing else, whatever the child does: crash, hang, print nonsense, lack python-mip.
Source  ours.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from zbfx.errors import ZbfxError
from zbfx.schedule.integer.formulation import IntegerProgram

CHILD = (sys.executable, str(Path(__file__).with_name("mip_child.py")))
STOP_S, STOP_SHARE = 0.2, 0.1  # a solver stops this much, and this part of its limit, before it would be ended


class SolverFailed(ZbfxError):
    """The solver gave no usable answer; the message says why and what to do."""


@dataclass(frozen=True)
class Answer:
    """What the solver claims: values per column if it found any, and whether it calls them optimal."""

    values: tuple[float, ...] | None
    optimal: bool
    infeasible: bool
    bound: float | None  # no solution has a smaller objective
    seconds: float


def solvers() -> tuple[str, ...]:
    """What can be tried here, best first; empty without python-mip."""
    if find_spec("mip") is None:
        return ()
    # python-mip reaches HiGHS through the shared library of highsbox; recent highspy no longer exports its functions.
    return ("HiGHS", "CBC") if find_spec("highsbox") else ("CBC",)


def solve_with_any(program: IntegerProgram, limit_s: float) -> Answer:
    """The answer of the first solver that gives a usable one."""
    failed = SolverFailed("the integer program needs python-mip: pip install mip; the plan stays as it was")
    begun = time.perf_counter()
    for solver in solvers():
        try:
            return solve_in_child(program, limit_s - (time.perf_counter() - begun), solver=solver)
        except SolverFailed as failure:
            failed = failure
        if time.perf_counter() - begun > limit_s - STOP_S:
            break
    raise failed


def solve_in_child(
    program: IntegerProgram, limit_s: float, *, solver: str = "CBC", seed: int = 0, command: Sequence[str] = CHILD
) -> Answer:
    """Solve `program` within `limit_s` seconds of wall clock. Raises SolverFailed when there is no usable answer."""
    begun = time.perf_counter()
    request = {
        "lower": program.lower,
        "upper": program.upper,
        "first_binary": program.first_binary,
        "start": program.start,
        "rows": [(row.columns, row.coefficients, row.bound) for row in program.rows],
        "until_s": time.time() + (1 - STOP_SHARE) * limit_s - STOP_S,
        "solver": solver,
        "seed": seed,
    }
    output = run_child(command, json.dumps(request), limit_s)
    try:
        claim = json.loads(output)
        status, values, bound = claim["status"], claim["values"], claim["bound"]
        if values is not None:
            values = tuple(map(float, values))
            if len(values) != len(program.lower) or not all(map(math.isfinite, values)):
                raise ValueError(f"{len(values)} values for {len(program.lower)} columns, or not finite")
        bound = None if bound is None else float(bound)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise SolverFailed(f"the solver's answer cannot be read ({error}); the plan stays as it was") from error
    return Answer(
        values=values,
        optimal=status == "OPTIMAL" and values is not None,
        infeasible=status in ("INFEASIBLE", "INT_INFEASIBLE"),
        bound=bound,
        seconds=time.perf_counter() - begun,
    )


def run_child(command: Sequence[str], text: str, limit_s: float) -> str:
    """What the child printed. The child and all that it started are gone when this returns or raises."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise SolverFailed(f"the solver's process cannot start ({error}); the plan stays as it was") from error
    try:
        output, errors = child.communicate(text, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise SolverFailed(
            f"the solver did not stop within {limit_s:g} s and was ended; the plan stays as it was. "
            "Give it more time or a smaller problem"
        ) from None
    finally:  # the child's whole session ends, also on Ctrl-C in the parent
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                stream.close()
    if child.returncode:
        raise SolverFailed(f"{why_failed(child.returncode, errors)}; the plan stays as it was")
    return output


def why_failed(status: int, errors: str) -> str:
    last = errors.strip().splitlines()[-1] if errors.strip() else ""
    if "No module named 'mip'" in errors or "import of mip halted" in errors:
        return "the integer program needs python-mip: pip install mip"
    if "HiGHS not found" in errors:
        return "python-mip finds no HiGHS: pip install highsbox"
    if status < 0:
        return f"the solver's process was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"the solver's process failed with status {status}: {last}"
