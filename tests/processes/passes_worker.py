"""Passes of the user's over processes, for tests/test_user_passes.py."""

from __future__ import annotations

from typing import Any

from tests.processes.worker import refusal
from tests.support.models import mlp
from tests.support.reference import compiled
from tests.support.user_passes import scaled, sine_for_tanh
from zbfx.graphs import Stage
from zbfx.user_pass import Pass


def passes_everywhere(rank: int) -> dict[str, Any]:
    """Loss of a step, of another shape and of an evaluation, and the calls of passes on this rank."""
    problem, calls = mlp(3), list[str]()

    def noted(stage: Stage) -> Stage:
        calls.append(str(stage.index))
        return stage

    passes = [Pass("joint", sine_for_tanh), Pass("stage", noted)]
    step = compiled(problem, 2, 3, passes=passes, check=False).bind(on_new_shape="recompile")
    batch = (*problem.inputs, *problem.targets)
    half = tuple(tensor[: len(tensor) // 2] for tensor in batch)
    losses = [float(call(*data)) for call in (step, step.evaluate) for data in (batch, half)]
    step.close()
    return {"losses": losses, "calls": calls}


def passes_that_differ(rank: int) -> dict[str, Any]:
    def of(factor: float) -> Pass:
        return Pass("joint", scaled(factor))

    problem = mlp(3)
    return refusal(lambda: compiled(problem, 2, 3, passes=[of(1.0 + rank)], check=False))
