"""Parts of a model that are compiled already, beside plain autograd in float64 on the same model left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.support.models import Problem, numbers, squares
from tests.support.reference import assert_same, compiled, default_dtype, reference, stepped

WIDTH, TOLERANCE = 4, 1e-12


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    with default_dtype(torch.float64):
        yield


def plain_double(x: Tensor) -> Tensor:
    return torch.tanh(2 * x)


double = torch.compile(plain_double, backend="eager")


class Parts(nn.Module):
    """Each part can be compiled by itself: a submodule, a function, a method, a function of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = nn.Linear(WIDTH, WIDTH)
        self.second: Any = nn.Linear(WIDTH, WIDTH)
        self.third: Any = nn.Linear(WIDTH, WIDTH)
        self.act: Any = torch.tanh
        self.acts: Any = [torch.sin]

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.acts[0](self.middle(self.act(self.first(x)))))


class Global(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(double(x))


def compile_module(model: Any) -> None:
    model.second = torch.compile(model.second, backend="eager")


def compile_in_place(model: Any) -> None:
    model.second.compile(backend="eager")


def compile_function(model: Any) -> None:
    model.act = torch.compile(model.act, backend="eager")


def compile_in_a_list(model: Any) -> None:
    model.acts = [torch.compile(model.acts[0], backend="eager")]


def compile_method(model: Any) -> None:
    model.middle = torch.compile(model.middle, backend="eager")


def compile_forward(model: Any) -> None:
    model.second.forward = torch.compile(model.second.forward, backend="eager")


class Own(nn.Module):
    """A module of the user's own, with hooks, a parametrized weight and a buffer that it writes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum())
        return self.layer(x)


def compile_a_module_of_the_user(model: Any) -> None:
    model.second = torch.compile(Own(), backend="eager")


def compile_a_parametrized_module(model: Any) -> None:
    """Its class has a `__deepcopy__`, which what torch.compile makes of it passes on."""
    model.second = torch.compile(nn.utils.parametrizations.weight_norm(model.second), backend="eager")


CASES: list[tuple[Callable[[Any], None], str]] = [
    (compile_module, "second"),
    (compile_a_module_of_the_user, "second"),
    (compile_a_parametrized_module, "second"),
    (compile_in_place, "second"),
    (compile_function, "act"),
    (compile_in_a_list, "acts"),
    (compile_method, "middle"),
    (compile_forward, "second.forward"),
]


def note_of(name: str) -> str:
    return f"traced as if torch.compile had not been called on them: {name}. backend= compiles the stages"


def agree(model: Any, name: str, loss_fn: Any = squares) -> None:
    problem = Problem(model, loss_fn, (numbers(6, WIDTH),))
    with torch.compiler.set_stance("force_eager"):
        expected = reference(problem, 3, model)
    pipe = compiled(problem, 2, 3, check=True)
    assert note_of(name) in pipe.schedule.notes
    assert_same(stepped(problem, pipe), expected, TOLERANCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of dynamo
@pytest.mark.parametrize("ran", [False, True], ids=["new", "ran before"])
@pytest.mark.parametrize(("change", "name"), CASES)
def test_compiled_parts_are_traced_as_they_were(change: Callable[[Any], None], name: str, *, ran: bool) -> None:
    """Also where dynamo has compiled them for arguments like these."""
    model = Parts()
    change(model)
    if ran:
        model(numbers(2, WIDTH)).sum().backward()
        model.zero_grad()
    agree(model, name)


def test_a_compiled_function_of_the_file() -> None:
    agree(Global(), "double")


def test_a_compiled_loss() -> None:
    agree(Parts(), "loss_fn", torch.compile(squares, backend="eager"))
    module: Any = nn.Sequential()
    module.forward = torch.compile(squares, backend="eager")
    agree(Parts(), "loss_fn.forward", module)


def test_a_model_without_compiled_parts_has_no_note() -> None:
    notes = compiled(Problem(Parts(), squares, (numbers(6, WIDTH),)), 2, 3).schedule.notes
    assert not any("torch.compile" in note for note in notes)


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(zbfx.ZbfxError, match=r"model is compiled by torch.compile. Pass the module itself"):
        compiled(Problem(torch.compile(Parts(), backend="eager"), squares, (numbers(6, WIDTH),)), 2, 3)  # type: ignore[arg-type]
