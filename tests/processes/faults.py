"""Scenarios of two ranks, of which rank 1 fails, for test_faults.py: functions of the rank, see tests/support/pool.py.
What is measured are seconds from the beginning of the call until it has ended, on each rank."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.models import mlp
from tests.support.reference import compiled
from zbfx.optim import PostValidated
from zbfx.runtime.engine import Engine

PLACES = ("first step", "later step", "evaluate", "bind")
PHASES = {"raise in B": "B1", "raise in W": "W1"}  # others fail in F


def raise_error(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("on purpose")


def run_out(*_: Any) -> Any:
    raise torch.OutOfMemoryError("on purpose")


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def leave(*_: Any) -> Any:
    os._exit(3)


def be_killed(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


FAILURES: dict[str, Callable[..., Any]] = {
    "raise in F": raise_error,
    "raise in B": raise_error,
    "raise in W": raise_error,
    "raise in the optimizer": raise_error,
    "out of memory": run_out,
    "Ctrl-C": interrupt,
    "os._exit": leave,
    "SIGKILL": be_killed,
    "between calls": raise_error,
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


def spoil(engine: Engine, phase: str, failure: Callable[..., Any]) -> None:
    """Let this rank's calls of a phase fail."""
    for call in engine.runners[0].calls:
        if call.phase.name == phase:
            call.take = failure  # type: ignore[method-assign]


def uncaught() -> None:
    """An exception that nobody catches ends this process."""
    try:
        raise_error()
    except ArithmeticError:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def in_bind(rank: int, failure: str) -> dict[str, Any]:
    pipe = compiled(mlp(3), 2, 3, check=False)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("zbfx.runtime.bind.prepare", FAILURES[failure])
        return outcome(pipe.bind)


COMPILE = ("arguments", "trace", "fit", "self_checked")  # of them the first is refused, others fail


def in_compile(rank: int) -> dict[str, dict[str, Any]]:
    """Rank 1 fails at each of these places, and nothing of it is left for the next."""
    found = {}
    for place in COMPILE:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and place != "arguments":
                patch.setattr(f"zbfx.pipeline.{place}", raise_error)
            stages: Any = "two" if rank == 1 and place == "arguments" else 2
            found[place] = outcome(partial(compiled, mlp(3), stages, 3))
    found["right"] = outcome(lambda: compiled(mlp(3), 2, 3))
    return found


def in_call(rank: int, failure: str, place: str) -> dict[str, Any]:
    problem = mlp(3)
    step = compiled(problem, 2, 3, check=False).bind()
    batch = (*problem.inputs, *problem.targets)
    if place == "later step":
        step(*batch)
    if place == "evaluate":
        step.evaluate(*batch)
    if failure == "raise in the optimizer":
        return in_optimizer(rank, step, batch)
    if rank == 1 and failure == "between calls":
        uncaught()
    if rank == 1:
        engine = next(iter(step.engines.others.values())) if place == "evaluate" else step.engine
        spoil(engine, PHASES.get(failure, "F1"), FAILURES[failure])
    return outcome(lambda: (step.evaluate if place == "evaluate" else step)(*batch))


def in_optimizer(rank: int, step: Any, batch: tuple[Any, ...]) -> dict[str, Any]:
    inner = torch.optim.SGD(step.parameters(), lr=0.1)
    optimizer = PostValidated(inner, step, sync=True)
    step(*batch)
    if rank == 1:
        inner.step = raise_error  # type: ignore[method-assign]

    def trained() -> None:
        optimizer.step()
        step(*batch)

    return outcome(trained)


def fails(rank: int, failure: str, place: str) -> dict[str, Any]:
    return in_bind(rank, failure) if place == "bind" else in_call(rank, failure, place)


def fails_everywhere(rank: int, failure: str, places: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Place by place, for failures that leave the process alive: it binds again."""
    return {place: fails(rank, failure, place) for place in places}
