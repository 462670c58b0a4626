"""Scenarios of two ranks, of which rank 1 fails, for test_faults.py: functions of the rank, see tests/support/pool.py.
What is measured are seconds from the beginning of the call until it has ended, on each rank."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import zbfx.pipeline
from tests.support.models import mlp
from tests.support.reference import compiled
from zbfx.optim import PostValidated
from zbfx.testing import faults
from zbfx.testing.places import place

PLACES = ("first step", "later step", "evaluate", "bind")
FAILURES: dict[str, tuple[faults.Fault, str]] = {
    "raise in F": (faults.Raise(), "F1.0"),
    "raise in B": (faults.Raise(), "B1.0"),
    "raise in W": (faults.Raise(), "W1.0"),
    "out of memory": (faults.Raise(torch.OutOfMemoryError("on purpose")), "F1.0"),
    "Ctrl-C": (faults.Raise(KeyboardInterrupt()), "F1.0"),
    "os._exit": (faults.Leave(), "F1.0"),
    "SIGKILL": (faults.Kill(), "F1.0"),
}


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """What a call raises and prints, and after how long."""
    begun, kind, text = time.monotonic(), "", ""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            call()
        except BaseException as error:
            kind, text = type(error).__name__, str(error)
    return {"type": kind, "text": text, "printed": printed.getvalue(), "seconds": time.monotonic() - begun}


def uncaught() -> None:
    """An exception that nobody catches ends this process."""
    try:
        raise faults.InjectedError("on purpose")
    except ArithmeticError:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def in_bind(failure: str) -> dict[str, Any]:
    pipe = compiled(mlp(3), 2, 3, check=False)
    with faults.injected(FAILURES[failure][0], faults.BIND, rank=1):
        return outcome(pipe.bind)


COMPILE = ("arguments", "trace", "fit", "self_checked")  # of them the first is refused, others fail


def in_compile(rank: int) -> dict[str, dict[str, Any]]:
    """Rank 1 fails at each of these places, and nothing of it is left for the next."""
    stages: Any = "two" if rank == 1 else 2
    found = {"arguments": outcome(partial(compiled, mlp(3), stages, 3))}
    for name in COMPILE[1:]:
        with faults.injected(faults.Raise(), place(name, zbfx.pipeline, name), rank=1):
            found[name] = outcome(partial(compiled, mlp(3), 2, 3))
    found["right"] = outcome(lambda: compiled(mlp(3), 2, 3))
    return found


def in_call(rank: int, failure: str, at: str) -> dict[str, Any]:
    problem = mlp(3)
    step = compiled(problem, 2, 3, check=False).bind()
    batch = (*problem.inputs, *problem.targets)
    if at == "later step":
        step(*batch)
    if at == "evaluate":
        step.evaluate(*batch)
    if failure == "raise in the optimizer":
        return in_optimizer(step, batch)
    if rank == 1 and failure == "between calls":
        uncaught()
    if failure == "between calls":
        return outcome(lambda: (step.evaluate if at == "evaluate" else step)(*batch))
    fault, action = FAILURES[failure]
    with faults.injected(fault, faults.action(action), rank=1):
        return outcome(lambda: (step.evaluate if at == "evaluate" else step)(*batch))


def in_optimizer(step: Any, batch: tuple[Any, ...]) -> dict[str, Any]:
    optimizer = PostValidated(torch.optim.SGD(step.parameters(), lr=0.1), step, sync=True)
    step(*batch)

    def trained() -> None:
        optimizer.step()
        step(*batch)

    with faults.injected(faults.Raise(), faults.OPTIMIZER, rank=1):
        return outcome(trained)


def fails(rank: int, failure: str, at: str) -> dict[str, Any]:
    return in_bind(failure) if at == "bind" else in_call(rank, failure, at)


def fails_everywhere(rank: int, failure: str, places: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Place by place, for failures that leave the process alive: it binds again."""
    return {at: fails(rank, failure, at) for at in places}
