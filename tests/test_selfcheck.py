"""`compile` checks small pipelines by itself: what a trace baked in is refused by name, and nothing changes.

Run: pytest tests/test_selfcheck.py (CPU, one process).
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.models import Problem, mlp, numbers, squares
from tests.reference import compiled
from zbfx import TraceError, ZbfxError, check, selfcheck
from zbfx.graphs import copy_graph

WIDTH = 6


class Drifts(nn.Module):
    """Scales by a Python number that another call changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(torch.tanh(self.layer(x))) * self.calls


class Rolls(Drifts):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + random.random() * x


class Logs(Drifts):
    """Not a number wherever its input is below 0, and an error where an index is not in order."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.log())


def problem(model: nn.Module) -> Problem:
    return Problem(model, squares, (numbers(6, WIDTH),))


@pytest.mark.parametrize("model", [Drifts, Rolls])
@pytest.mark.parametrize("choice", ["auto", True])
def test_python_value_that_changes_is_refused(model: type[nn.Module], choice: Any) -> None:
    with pytest.raises(TraceError) as caught:
        compiled(problem(model()), 1, 3, check=choice)
    message = str(caught.value)
    assert "computes other results than the model" in message
    assert "of the model itself (a Python value that changes from call to call?): different" in message
    assert "pass what changes as a tensor, or keep it in a buffer" in message
    assert "check=False" in message
    assert compiled(problem(model()), 1, 3, check=False).stages


def test_nothing_changes() -> None:
    """Not the model, its buffers and attributes, nor any generator of random numbers; nor `.grad`."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    before = copy.deepcopy(model.state_dict())
    numpy.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), numpy.random.rand()
    numpy.random.seed(3)
    pipe = compiled(problem(model), 2, 3, check=True)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.random.rand() == states[2]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not [note for note in pipe.schedule.notes if "checked" in note]


def test_drawing_model_leaves_pythons_generator_alone() -> None:
    state = random.getstate()
    selfcheck.run(compiled(problem(nn.Linear(WIDTH, WIDTH)), 1, 3, check=False), True)
    with selfcheck.undisturbed(torch.device("cpu")):
        random.random(), numpy.random.rand(), torch.rand(1)
    assert random.getstate() == state


def test_what_is_not_a_number_on_both_sides_agrees() -> None:
    pipe = compiled(problem(Logs()), 1, 3, check=True)
    report = check(pipe)
    assert report
    assert report.bitwise < report.compared  # not a number is never equal in bits


def test_error_on_random_data_is_noted_or_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise IndexError("index 7 is out of range")

    monkeypatch.setattr(selfcheck, "check", fails)
    pipe = compiled(problem(nn.Linear(WIDTH, WIDTH)), 1, 3)
    assert pipe.schedule.notes[-1] == "not checked: IndexError: index 7 is out of range"
    with pytest.raises(ZbfxError, match="random data of the example's kind, and failed: IndexError: index 7"):
        compiled(problem(nn.Linear(WIDTH, WIDTH)), 1, 3, check=True)
    with pytest.raises(ZbfxError, match="check is one of"):
        compiled(problem(nn.Linear(WIDTH, WIDTH)), 1, 3, check="always")


def test_wrong_split_is_refused() -> None:
    """A gradient that is scaled in one phase: found with its name, and blamed on zbfx."""
    pipe = compiled(mlp(3), 2, 3, check=False)
    graph = copy_graph(pipe.joint.graph)
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.tanh.default)
    node.target = torch.ops.aten.sin.default
    wrong = replace(pipe, joint=replace(pipe.joint, graph=graph))
    with pytest.raises(TraceError, match=r"please report the model|a Python value that changes"):
        selfcheck.run(wrong, "auto")


def test_runs_where_it_is_small_and_there_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(pipe: Any, **options: Any) -> Any:
        seen.append(len(pipe.stages))
        return check(pipe, **options)

    monkeypatch.setattr(selfcheck, "check", counted)
    small = mlp(3)
    compiled(small, 2, 3)
    compiled(small, 3, 3, check=False)
    compiled(replace(small, model=copy.deepcopy(small.model).to("meta")), 3, 3)
    monkeypatch.setattr(selfcheck, "LARGEST_BYTES", 1000)
    compiled(small, 3, 3)
    compiled(small, 1, 3, check=True)
    assert seen == [2, 1]
