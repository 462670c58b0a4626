"""The identity of a model and its loss: by kind, two that compute otherwise are told apart, and equal ones are not.

Run: pytest tests/plans/test_identity.py (CPU, one process).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Problem, squares
from tests.support.reference import compiled
from zbfx.errors import ZbfxError
from zbfx.plans.identity import identity

Pair = tuple[nn.Module, Any]  # a model and its loss
TABLE: list[Any] = []
USER, USER.sub = ModuleType("user_package"), ModuleType("user_package.sub")  # type: ignore[attr-defined]
CACHED: Any = None


class Holder(nn.Module):
    """Holds values that no code of its own reads."""

    def __init__(self, *values: Any) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        return x


def with_gain(gain: float) -> nn.Module:
    module = nn.Identity()
    module.gain_of_another_file = gain  # type: ignore[assignment]
    return module


def held(*values: Any) -> Pair:
    return Holder(*values), None


def loss_with(criterion: Any) -> Pair:
    return nn.Identity(), lambda output, targets: criterion(output, targets)


def called(criterion: Any, output: Tensor) -> Any:
    return criterion(output, output)


def global_loss(output: Tensor, targets: Tensor) -> Tensor:
    return TABLE[0](output, targets)


def loss_by_table(criterion: Any) -> Pair:
    TABLE[:] = [criterion]
    return nn.Identity(), global_loss


def loss_by_package(scale: float) -> Pair:
    USER.sub.scale = scale
    return nn.Identity(), lambda output: output.sum() * USER.sub.scale


def loss_by_cached(scale: float) -> Pair:
    globals()["CACHED"] = lru_cache((lambda: 1.0) if scale == 1.0 else (lambda: 2.0))
    return nn.Identity(), lambda output: output.sum() * CACHED()


def scaling(scale: float) -> Callable[..., Any]:
    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any) -> Any:
            return function(*args) * scale

        return call

    return decorated


def loss_by_decorated(scale: float) -> Pair:
    globals()["CACHED"] = scaling(scale)(squares)
    return nn.Identity(), lambda output: CACHED(output)


def of_one_name(kind: float) -> Callable[[Tensor], Tensor]:
    if kind == 1.0:

        def act(x: Tensor) -> Tensor:
            return x * 2

    else:

        def act(x: Tensor) -> Tensor:
            return x * 3

    return act


def clipped(least: float | None, most: float | None) -> Pair:
    def loss(output: Tensor) -> Tensor:
        return output.clamp(min=least, max=most).sum()

    return nn.Identity(), loss


def made(value: float, place: str) -> Pair:
    """A module of a class made here, which has a value in one place."""
    closed = value if place == "closure" else 0.0

    class Made(nn.Module):
        scale = value if place == "class" else 0.0

        def forward(self, x: Tensor, shift: float = value if place == "default" else 0.0) -> Tensor:
            return x * self.scale + shift + closed

    return Made(), None


KINDS: dict[str, Callable[[float], Pair]] = {
    "a module in a closure": lambda v: loss_with(nn.CrossEntropyLoss(label_smoothing=v / 4)),
    "a module in a list": lambda v: loss_by_table(nn.CrossEntropyLoss(label_smoothing=v / 4)),
    "a module in a partial": lambda v: (nn.Identity(), partial(called, nn.CrossEntropyLoss(label_smoothing=v / 4))),
    "the mode of a module in a closure": lambda v: loss_with(nn.Dropout().train(v == 1.0)),
    "a buffer of a module in a closure": lambda v: loss_with(nn.CrossEntropyLoss(weight=torch.full((3,), v))),
    "a child of a module in a closure": lambda v: loss_with(nn.Sequential(nn.Dropout(v / 4))),
    "functions of one name": lambda v: held(of_one_name(1.0), of_one_name(v)),
    "classes of one name": lambda v: (nn.Sequential(made(1.0, "closure")[0], made(v, "closure")[0]), None),
    "None in a closure": lambda v: clipped(0.5, None) if v == 1.0 else clipped(None, 0.5),
    "a value of a class": lambda v: made(v, "class"),
    "a default of a method": lambda v: made(v, "default"),
    "a closure of a method": lambda v: made(v, "closure"),
    "a scalar of numpy": lambda v: held(np.float32(v)),
    "an array of numpy": lambda v: held(np.full(5000, v)),
    "a dtype of numpy": lambda v: held(np.zeros(3, np.float32 if v == 1.0 else np.float64)),
    "a cached function": loss_by_cached,
    "a decorated function": loss_by_decorated,
    "a value of a package's module": loss_by_package,
    "an attribute that no method reads": lambda v: (with_gain(v), None),
    "a parameter in a list": lambda v: held([nn.Parameter(torch.full((3,), v))]),
    "a distribution": lambda v: held(torch.distributions.Normal(torch.full((3,), v), 1.0)),
}


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    yield
    TABLE.clear()
    globals()["CACHED"] = None


@pytest.mark.parametrize("kind", KINDS)
def test_two_that_differ_are_told_apart(kind: str) -> None:
    found = [identity(*KINDS[kind](value)) for value in (1.0, 2.0, 1.0)]
    assert found[0] == found[2]
    assert found[0].parts != found[1].parts
    assert not found[0].strange


def test_modules_of_the_model_are_told_once() -> None:
    model = nn.Linear(3, 3)
    model.forward = model.forward  # type: ignore[method-assign]  # bound to the model, whose values do not count
    before = identity(model, None)
    nn.init.zeros_(model.weight)
    assert identity(model, None) == before


def test_what_nothing_tells_apart_is_not_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Holder(iter([1.0])), nn.Linear(3, 3))
    problem = Problem(model, squares, (torch.zeros(4, 3),))
    name = r"objects of builtins\.list_iterator, which have neither"
    with pytest.warns(UserWarning, match=f"this plan is not kept in the cache: .*{name}"):
        pipe = compiled(problem, 1, 2, check=False, cache=tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ZbfxError, match=name):
        pipe.save(tmp_path / "plan")
    assert not identity(*held(object(), len, torch.add, Tensor.add, torch.ops.aten.add.Tensor)).strange
