"""`compile` checks small pipelines by itself: what a trace baked in is refused by name, and nothing changes."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Problem, mlp, numbers, squares
from tests.support.reference import compiled
from zbfx import TraceError, ZbfxError, check, selfcheck
from zbfx.gradient_check import check_compiled
from zbfx.graphs import copy_graph

WIDTH = 6


class Drifts(nn.Module):
    """Scales by a Python number that another call changes, out of sight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.norm(torch.tanh(self.layer(x))) * self.calls[0]


class Rolls(Drifts):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)) + random.random() * x


class Logs(Drifts):
    """Not a number wherever its input is below 0, and an error where an index is not in order."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.log())


def problem(model: nn.Module) -> Problem:
    return Problem(model, squares, (numbers(6, WIDTH),))


@pytest.mark.slow
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
    pipe = compiled(problem(nn.Linear(WIDTH, WIDTH)), 1, 3, check=False)
    selfcheck.checked(pipe.compiled, pipe.source, True)
    with selfcheck.undisturbed(torch.device("cpu")):
        random.random(), numpy.random.rand(), torch.rand(1)
    assert random.getstate() == state


def test_what_is_not_a_number_on_both_sides_agrees() -> None:
    pipe = compiled(problem(Logs()), 1, 3, check=True)
    report = check(pipe)
    assert report
    assert report.bitwise < report.compared  # not a number is never equal in bits


class Picky(Drifts):
    """Takes indices in ascending order alone, which no random data are."""

    def forward(self, x: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        if not torch.compiler.is_compiling() and not bool((index.diff() > 0).all()):
            raise ValueError("indices ascend")
        return self.layer(x)[index]


class Stern(Drifts):
    """Takes no data at all outside a trace."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            raise IndexError("index 7 is out of range")
        return self.layer(x)


def test_where_random_data_mean_nothing_the_example_is_tried() -> None:
    ascending = Problem(Picky(), squares, (numbers(12, WIDTH), torch.arange(4).repeat(3)))
    pipe = compiled(ascending, 1, 3)
    report = check(pipe)
    assert (report.compared, len(report.findings)) == (24, 0)  # two steps, twice: 3 losses, theirs, weight and bias
    assert pipe.schedule.notes == ()
    for choice in ("auto", True):
        with pytest.raises(ZbfxError) as caught:
            compiled(problem(Stern()), 1, 3, check=choice)
        message = str(caught.value)
        assert "cannot run" in message
        assert "IndexError: index 7 is out of range" in message
        assert "check=False" in message
    with pytest.raises(ZbfxError, match="check is one of"):
        compiled(problem(nn.Linear(WIDTH, WIDTH)), 1, 3, check="always")


def test_no_memory_for_the_check_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 7 GiB")

    monkeypatch.setattr(selfcheck, "check_compiled", fails)
    pipe = compiled(problem(nn.Linear(WIDTH, WIDTH)), 1, 3)
    assert pipe.schedule.notes[-1] == "not checked: OutOfMemoryError: tried to allocate 7 GiB"
    with pytest.raises(torch.OutOfMemoryError):
        compiled(problem(nn.Linear(WIDTH, WIDTH)), 1, 3, check=True)


@pytest.mark.parametrize("wrong", [None, 3, nn.Linear(2, 2)])
def test_check_of_something_else(wrong: Any) -> None:
    with pytest.raises(ZbfxError, match=r"check takes a pipeline, what zbfx.compile returns; found \w+ "):
        check(wrong)


def test_wrong_split_is_refused() -> None:
    """A gradient that is scaled in one phase: found with its name, and blamed on zbfx."""
    pipe = compiled(mlp(3), 2, 3, check=False)
    graph = copy_graph(pipe.compiled.joint.graph)
    node = next(n for n in graph.nodes if n.target is torch.ops.aten.tanh.default)
    node.target = torch.ops.aten.sin.default
    wrong = replace(pipe.compiled, joint=replace(pipe.compiled.joint, graph=graph))
    with pytest.raises(TraceError, match=r"please report the model|a Python value that changes"):
        selfcheck.checked(wrong, pipe.source, "auto")


@pytest.mark.slow
def test_runs_where_it_is_small_and_there_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(pipe: Any, *options: Any) -> Any:
        seen.append(len(pipe.stages))
        return check_compiled(pipe, *options)

    monkeypatch.setattr(selfcheck, "check_compiled", counted)
    small = mlp(3)
    compiled(small, 2, 3)
    compiled(small, 3, 3, check=False)
    compiled(replace(small, model=copy.deepcopy(small.model).to("meta")), 3, 3)
    monkeypatch.setattr(selfcheck, "LARGEST_BYTES", 1000)
    compiled(small, 3, 3)
    compiled(small, 1, 3, check=True)
    assert seen == [2, 1]
