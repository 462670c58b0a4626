"""What code of a model and its loss reads elsewhere than in the model's attributes: a change between steps is refused
by name, and tensors that lie there are followed. The judge of what is followed is plain autograd."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tests.support.models import Problem, numbers
from tests.support.reference import assert_same, compiled, default_dtype, reference
from zbfx import InputError, TraceError, ZbfxError
from zbfx.runtime.step import Step

WIDTH = 4
FACTOR = 1.0


class Act(Enum):
    TANH = 1
    SIN = 2


class Settings:
    """Only `scale` is read."""

    def __init__(self) -> None:
        self.scale, self.steps = 1.0, 0


class Reading(nn.Module):
    """A forward that reads from every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.settings, self.table, self.row, self.pair = Settings(), {"a": 1.0}, [1.0], (1.0,)
        self.act, self.extra, self.bias = Act.TANH, None, [torch.ones(WIDTH)]
        self.slope = partial(nn.functional.leaky_relu, negative_slope=0.1)
        self.outside = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).eval().requires_grad_(False)]
        self.order, self.shift = [self.first, self.second], numpy.zeros(WIDTH)
        self.notes: list[Tensor] = []
        self.terms = {"a": 0.0}  # read as a whole

    def activated(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.act is Act.TANH else torch.sin(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = self.activated(layer(x)) * self.table["a"] * self.row[0]
        self.notes.append(x.detach())
        x = self.slope(x) * self.settings.scale * self.pair[0] + self.bias[0] + self.outside[0](x)
        x = x + torch.from_numpy(self.shift) + sum(self.terms.values())
        return x if self.extra is None else x * self.extra


class Loss:
    """A loss with a module, a tensor and a number of its own."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.head, self.weight, self.factor = nn.Linear(WIDTH, WIDTH).requires_grad_(False), [torch.ones(WIDTH)], 1.0
        self.seen = 0

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        return (((self.head(out) - target) * self.weight[0]) ** 2).mean() * self.factor * FACTOR


class Given(NamedTuple):
    problem: Problem
    model: Any
    loss: Any
    step: Step


@pytest.fixture(scope="module")
def pipeline() -> Given:
    with default_dtype(torch.float64):
        problem = Problem(Reading(), Loss(), (numbers(4, WIDTH).double(),), (numbers(4, WIDTH, seed=2).double(),))
        step = compiled(problem, 2, 2).run_local()
        return Given(problem, problem.model, problem.loss_fn, step)


def put(value: Any, key: Any) -> Callable[[Any], Any]:
    """A function that puts a value into a list, an array, a dict or an object, and returns what takes it back."""

    def change(owner: Any) -> Callable[[], None]:
        absent = object()
        entries: Any = owner if isinstance(owner, list | dict | numpy.ndarray) else vars(owner)
        before = entries.get(key, absent) if isinstance(entries, dict) else entries[key]

        def back() -> None:
            if before is absent:
                del entries[key]
            else:
                entries[key] = before

        entries[key] = value
        return back

    return change


def hooked(module: nn.Module) -> Callable[[], None]:
    return module.register_forward_hook(lambda *_: None).remove


def turned(module: Any) -> Callable[[], None]:
    module.train()
    return module.eval


def of_class(owner: type, name: str, value: Any) -> Callable[[], None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def trainable(tensor: Tensor) -> Callable[[], Any]:
    tensor.requires_grad_(True)
    return lambda: tensor.requires_grad_(False)


def reversed_order(model: Any) -> Callable[[], None]:
    model.order.reverse()
    return model.order.reverse


CHANGES: dict[str, tuple[Callable[[Given], Any], str]] = {
    "object": (lambda g: put(2.0, "scale")(g.model.settings), "settings.scale was 1.0"),
    "another object": (lambda g: put(SimpleNamespace(scale=2.0), "settings")(g.model), "settings.scale was 1.0"),
    "dict": (lambda g: put(2.0, "a")(g.model.table), "table['a'] was 1.0"),
    "key of a dict": (lambda g: put(2.0, "b")(g.model.terms), "terms['b'] was nothing"),
    "list": (lambda g: put(2.0, 0)(g.model.row), "row[0] was 1.0"),
    "tuple": (lambda g: put((2.0,), "pair")(g.model), "pair[0] was 1.0"),
    "enum": (lambda g: put(Act.SIN, "act")(g.model), "act was <Act.TANH: 1>"),
    "none": (lambda g: put(2.0, "extra")(g.model), "extra was None"),
    "partial": (
        lambda g: put(partial(nn.functional.leaky_relu, negative_slope=0.5), "slope")(g.model),
        "slope.keywords['negative_slope'] was 0.1",
    ),
    "array": (lambda g: put(numpy.ones(WIDTH), "shift")(g.model), "shift was an array of float64 and shape (4,)"),
    "in an array": (lambda g: put(1.0, 0)(g.model.shift), "found another one (an array of float64"),
    "order of layers": (lambda g: reversed_order(g.model), "order[0] was first"),
    "another tensor": (lambda g: put(torch.zeros(WIDTH), 0)(g.model.bias), "bias[0] was a tensor of"),
    "mode outside": (lambda g: turned(g.model.outside[0]), "outside[0].training was False"),
    "probability outside": (lambda g: put(0.9, "p")(g.model.outside[0][1]), "outside[0].1.p was 0.5"),
    "hook outside": (lambda g: hooked(g.model.outside[0][0]), "the hooks of outside[0].0[0] was nothing"),
    "method": (lambda g: of_class(Reading, "activated", lambda _, x: x), "Reading.activated was <function"),
    "hook of all modules": (
        lambda g: register_module_forward_hook(lambda *_: None).remove,
        "the hooks of all modules[0] was nothing",
    ),
    "global": (lambda g: put(2.0, "FACTOR")(globals()), ".FACTOR was 1.0"),
    "loss's number": (lambda g: put(2.0, "factor")(g.loss), "loss_fn.factor was 1.0"),
    "loss's tensor": (lambda g: put(torch.zeros(WIDTH), 0)(g.loss.weight), "loss_fn.weight[0] was a tensor of"),
    "loss's module": (lambda g: put(nn.Linear(WIDTH, WIDTH), "head")(g.loss), "loss_fn.head was a Linear"),
    "loss's module trains": (lambda g: trainable(g.loss.head.weight), "with requires_grad=False"),
}


@pytest.mark.parametrize(("change", "found"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_refused_by_name_until_it_is_taken_back(
    pipeline: Given, change: Callable[[Given], Any], found: str
) -> None:
    given, step = pipeline.problem, pipeline.step
    step(*given.inputs, *given.targets)
    back = change(pipeline)
    try:
        for _ in range(2):
            with pytest.raises(InputError) as caught:
                step(*given.inputs, *given.targets)
            assert found in str(caught.value)
            assert "when the model was traced, and is a constant of the graph; found " in str(caught.value)
    finally:
        back()
    step(*given.inputs, *given.targets)


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(pipeline: Given, take: Callable[[Any], Any]) -> None:
    with pytest.raises(ZbfxError, match="a step holds connections, graphs and the model itself, and cannot be copied"):
        take(pipeline.step)


def test_tensors_outside_of_the_model_are_followed(pipeline: Given) -> None:
    """In place, and what no code reads, and tensors that a forward has kept, may change."""
    given, model, loss = pipeline.problem, pipeline.model, pipeline.loss
    with torch.no_grad():
        model.bias[0].mul_(0.5)
        model.outside[0][0].weight.mul_(2.0)
        loss.head.weight.add_(0.5)
        loss.weight[0].fill_(0.25)
    model.settings.steps, loss.seen = 3, 3
    model.settings = SimpleNamespace(scale=float("1.0"))
    model.notes.append(torch.zeros(1))
    model.zero_grad()
    found = pipeline.step(*given.inputs, *given.targets)
    gradients = {name: parameter.grad for name, parameter in pipeline.step.named_parameters()}
    expected = reference(given, 2)
    assert_same((found, gradients), expected, 1e-14)
    model.settings.scale = 2.0  # of the object that came in the place of the first
    with pytest.raises(InputError, match=r"settings\.scale was 1\.0"):
        pipeline.step(*given.inputs, *given.targets)


def test_a_write_into_a_tensor_outside_of_the_model_is_refused_before_it_is_made() -> None:
    class Writes(Reading):
        def forward(self, x: Tensor) -> Tensor:
            self.bias[0].add_(1.0)
            return super().forward(x)

    model = Writes()
    with pytest.raises(TraceError, match="writes in place"):
        compiled(Problem(model, Loss(), (numbers(4, WIDTH),), (numbers(4, WIDTH, seed=2),)), 2, 2)
    assert torch.equal(model.bias[0], torch.ones(WIDTH))
