"""Solves one integer program in a process of its own. `solver.py` runs this file as a script.

Takes   a program as JSON on stdin.
Gives   the solver's status, values and bound as JSON on stdout.
Raises  whatever the solver raises. Source: python-mip. This file imports nothing of zbfx: a solver that crashes, hangs
        or exhausts memory takes only this process with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

OVERTIME_S = 5  # a solver that ignores its limit, in a process whose parent died, is ended by the alarm


def minimized(program: dict[str, Any]) -> dict[str, Any]:
    """Minimise column 0. Returns the solver's status, its values and its lower bound; nothing of it is checked here."""
    import mip

    model = mip.Model(sense=mip.MINIMIZE, solver_name=program["solver"])
    model.verbose = 0
    model.threads = 1
    model.seed = program["seed"]
    model.max_mip_gap = model.max_mip_gap_abs = 1e-9
    columns = [
        model.add_var(lb=low, ub=high, var_type="B" if column >= program["first_binary"] else "C")
        for column, (low, high) in enumerate(zip(program["lower"], program["upper"], strict=True))
    ]
    for numbers, coefficients, bound in program["rows"]:
        terms = zip(numbers, coefficients, strict=True)
        model += mip.xsum(value * columns[number] for number, value in terms) <= bound
    model.objective = columns[0]
    if program["start"] is not None:
        model.start = list(zip(columns, program["start"], strict=True))
    # Reading and building took their part of the time already.
    status = model.optimize(max_seconds=max(0.1, program["until_s"] - time.time()))
    found = model.num_solutions > 0
    return {
        "status": status.name,
        "values": [float(column.x) for column in columns] if found else None,
        "bound": float(model.objective_bound) if found else None,
    }


def serve() -> None:
    # Solvers print to file descriptor 1; the answer keeps the real one to itself.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = json.load(sys.stdin)
    signal.alarm(max(0, int(program["until_s"] - time.time())) + OVERTIME_S)
    json.dump(minimized(program), answer)
    answer.close()


if __name__ == "__main__":
    serve()
