"""What tests of refusals share: the messages of compile and of a step."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import zbfx
from tests.support.models import Maker, Problem
from tests.support.reference import compiled
from zbfx import InputError, ZbfxError


def refusal(problem: Problem, kind: type[ZbfxError] = ZbfxError, stages: int = 2, **options: Any) -> str:
    """The message with which compile refuses a problem of two microbatches."""
    with pytest.raises(kind) as caught:
        compiled(problem, stages, 2, **options)
    assert isinstance(caught.value, ZbfxError)
    return str(caught.value)


@functools.cache
def pipeline_of(make: Maker) -> zbfx.Pipeline:
    return compiled(make(2), 2, 2)


def step_refusal(problem: Problem | Maker, *args: Any, **kwargs: Any) -> str:
    """The message with which a step refuses other arguments; nothing has run when it comes."""
    pipe = compiled(problem, 2, 2) if isinstance(problem, Problem) else pipeline_of(problem)
    step = pipe.run_local()
    with pytest.raises(InputError) as caught:
        step(*args, **kwargs)
    assert all(parameter.grad is None for parameter in pipe.model.parameters())
    assert step.count == 0
    return str(caught.value)
