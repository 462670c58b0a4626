"""What the case tests share: a model that is one function, and the comparison with plain autograd in one process."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.support.models import Problem, numbers, squares
from tests.support.reference import assert_same, compiled, one_trace, reference, stepped
from zbfx import Kind, ZbfxError
from zbfx.graphs import Phase

WIDTH = 6
TOLERANCE = 1e-12


class Body(nn.Module):
    """A model that is one function of its parameters `a`, `b`, `c` (square matrices) and its arguments."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(3))
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def of(body: Callable[..., Any], *more_inputs: Any, loss_fn: Any = squares, microbatches: int = 3) -> Problem:
    """The problem of a body on one random input, and further inputs as given."""
    return Problem(Body(body), loss_fn, (numbers(2 * microbatches, WIDTH), *more_inputs))


def check(problem: Problem, stages: int | Iterable[int] = (1, 2, 3), microbatches: int = 3, **options: Any) -> Any:
    """A step equals plain autograd on a copy of the model: loss, gradients, buffers. Returns the last pipeline. One
    trace serves all numbers of stages."""
    traces: dict[nn.Module, Any] = {}
    pipe = None
    start = copy.deepcopy(problem.model.state_dict())
    for count in (stages,) if isinstance(stages, int) else stages:
        problem.model.load_state_dict(start)
        eager = copy.deepcopy(problem.model)
        expected = reference(problem, microbatches, eager)
        with one_trace(traces):
            pipe = compiled(problem, count, microbatches, **options)
        assert_same(stepped(problem, pipe), expected, TOLERANCE)
        for (name, found), wanted in zip(problem.model.named_buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=0, msg=name)
    return pipe


def refusal(problem: Problem, stages: int = 2, microbatches: int = 3, **options: Any) -> str:
    """The message with which compile refuses a problem."""
    with pytest.raises(ZbfxError) as caught:
        compiled(problem, stages, microbatches, **options)
    return str(caught.value)


def line_of(function: Callable[..., Any], text: str) -> str:
    """`file:line` of the line of a function that contains `text`."""
    lines, start = inspect.getsourcelines(function)
    offset = next(k for k, line in enumerate(lines) if text in line)
    return f"{inspect.getsourcefile(function)}:{start + offset}"


def phases(pipe: zbfx.Pipeline, *kinds: Kind) -> list[Phase]:
    """The phases of all stages, of these kinds or all."""
    return [phase for stage in pipe.stages for kind, phase in stage.phases.items() if kind in kinds or not kinds]


def count_ops(found: Iterable[Phase], *targets: Any) -> int:
    return sum(node.target in targets for phase in found for node in phase.module.graph.nodes)


def layers(count: int) -> nn.Sequential:
    """Linear and tanh in turn: layer k is "2k" by name."""
    torch.manual_seed(0)
    return nn.Sequential(*(block for _ in range(count) for block in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def linears(*names: str) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})


def rows(tensor: Tensor, k: int) -> Tensor:
    """The rows of microbatch k of three."""
    return tensor.chunk(3)[k]
