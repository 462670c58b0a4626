"""Threads of one process: calls of a step do not mix, models compile one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zbfx
from tests.support.models import Problem, gpt, mlp
from tests.support.reference import assert_same, compiled, default_dtype, reference, stepped
from zbfx.optim import PostValidated
from zbfx.runtime.step import Step


def elsewhere(action: Callable[[], Any]) -> BaseException | None:
    """What an action raises in another thread."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(action).exception()


def beside(step: Step, action: Callable[[], Any]) -> list[BaseException | None]:
    """Has another thread act while the first of the step's phases runs, once; the list gets what that raised."""
    call = step.engine.runners[0].calls[0]
    take, raised = call.take, list[BaseException | None]()

    def taken(box: list[Any]) -> Any:
        if not raised:
            raised.append(elsewhere(action))
        return take(box)

    call.take = taken  # type: ignore[method-assign]
    return raised


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "run_split", "evaluate", "close", "optimizer.step"])
def test_a_call_inside_that_of_another_thread_is_refused(name: str) -> None:
    with default_dtype(torch.float64):
        problem = mlp(3)
        expected = reference(problem, 3)
        step = compiled(problem, 2, 3).run_local()
        optimizer = PostValidated(torch.optim.SGD(step.parameters(), lr=0.1), step)
        batch = (*problem.inputs, *problem.targets)
        rows = zip(*(tensor.chunk(3) for tensor in batch), strict=True)
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: step(*batch),
            "run_split": lambda: step.run_split([(pair, {}) for pair in rows]),
            "evaluate": lambda: step.evaluate(*batch),
            "close": step.close,
            "optimizer.step": optimizer.step,
        }
        raised = beside(step, calls[name])
        loss = step(*batch)
        (error,) = raised
        assert type(error) is zbfx.ZbfxError
        assert str(error).startswith("a thread is inside a call of this step, and another one calls it")
        found = {key: parameter.grad for key, parameter in problem.model.named_parameters()}
        assert_same((loss, found), expected, 1e-12)
        assert elsewhere(lambda: step(*batch)) is None  # one call after the other, from whichever thread
        assert step.count == 2


@pytest.mark.slow
def test_threads_compile_at_the_same_time() -> None:
    with default_dtype(torch.float64):
        problems: list[Problem] = [gpt(2), mlp(2), mlp(2, layers=4), gpt(2)]
        start = threading.Barrier(len(problems))

        def compiled_at_once(problem: Problem) -> zbfx.Pipeline:
            start.wait(60.0)
            return compiled(problem, 2, 2, check=False)

        with ThreadPoolExecutor(len(problems)) as threads:
            pipes = list(threads.map(compiled_at_once, problems))
        for problem, pipe in zip(problems, pipes, strict=True):
            assert_same(stepped(problem, pipe), reference(problem, 2), 1e-12)
