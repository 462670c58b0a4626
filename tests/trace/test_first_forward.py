"""Models that make tensors in their first forward: in the graph where that is the same, refused where it is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases.common import line_of
from tests.refusals.common import refusal
from tests.support.models import Problem, numbers, squares
from tests.support.reference import assert_same, compiled, default_dtype, reference
from zbfx import ZbfxError
from zbfx.graphs import Role

WIDTH = 6


class Rotary(nn.Module):
    """Turns pairs of features by angles that it computes once, from a buffer, in one of many ways to keep them."""

    frequencies: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", torch.linspace(1.0, 2.0, WIDTH // 2), persistent=False)
        self.way = way
        self.table: Any = None
        self.tables: Any = {} if way == "dict" else []
        self.built = False
        self.longest: int | None = None
        self.rows: Tensor | None = None
        if way == "buffer":
            del self.table
            self.register_buffer("table", None, persistent=False)
        if way == "absent":
            del self.table

    def turns(self, x: Tensor) -> Tensor:
        angles = torch.cat([self.frequencies, self.frequencies]) * torch.arange(WIDTH)
        return torch.stack([angles.cos(), angles.sin()])

    def kept(self, x: Tensor) -> Tensor:
        if self.way in ("attribute", "buffer") and self.table is None:
            self.table = self.turns(x)
        if self.way == "absent" and not hasattr(self, "table"):
            self.register_buffer("table", self.turns(x), persistent=False)
        if self.way == "pair":
            if self.table is None:
                self.table = tuple(self.turns(x))
            return torch.stack(list(self.table))
        if self.way == "flag":
            if not self.built:
                self.table, self.built = self.turns(x), True
            return self.table
        if self.way == "length":
            if self.longest is None or len(x) > self.longest:
                self.longest, self.table = len(x), self.turns(x)
            return self.table
        if self.way in ("dict", "list"):
            if not self.tables:
                if self.way == "dict":
                    self.tables[WIDTH] = self.turns(x)
                else:
                    self.tables.append(self.turns(x))
            return self.tables[WIDTH if self.way == "dict" else 0]
        return self.table

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.rows = h.detach()  # read by nothing
        cos, sin = self.kept(x)
        return self.second(h * cos + h.roll(1, -1) * sin)


WAYS = ["attribute", "buffer", "absent", "pair", "flag", "length", "dict", "list"]


def problem(way: str) -> Problem:
    return Problem(Rotary(way), squares, (numbers(4, WIDTH),))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forwards", ["none", "before compile", "after compile"])
def test_tables_of_the_first_forward(way: str, forwards: str) -> None:
    with default_dtype(torch.float64):
        case = problem(way)
        expected = reference(case, 2)
        if forwards == "before compile":
            case.model(case.inputs[0][:2])
        pipe = compiled(case, 2, 2, check=True)
        held = [port.name for port in pipe.compiled.joint.inputs if port.role in (Role.BUFFER, Role.CONSTANT)]
        assert (len(held) > 1) == (forwards == "before compile")
        if forwards == "after compile":
            case.model(case.inputs[0][:3])
        if way == "flag" and forwards == "after compile":
            with pytest.raises(ZbfxError, match="built was False when the model was traced"):
                pipe.run_local()(*case.inputs)
            return
        step = pipe.run_local(on_new_shape="recompile")
        case.model.zero_grad()
        loss = step(*case.inputs)
        assert_same((loss, {name: p.grad for name, p in step.named_parameters()}), expected, 1e-14)
        if forwards != "before compile":  # else the rows that nothing reads have one shape
            assert torch.allclose(step.evaluate(*case.inputs), expected[0], rtol=1e-14)
            assert torch.allclose(step(torch.cat([*case.inputs, *case.inputs])), expected[0], rtol=1e-14)


def test_compile_leaves_the_model_without_tables() -> None:
    case = problem("dict")
    compiled(case, 2, 2, check=True)
    assert case.model.tables == {}
    assert case.model.rows is None


class Carrying(nn.Module):
    """Keeps something of its first forward that is not the same in every one."""

    count: Tensor
    last: Tensor | None

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(WIDTH, WIDTH), what
        self.last = None
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.count += 1
        if self.last is None:
            made: dict[str, Callable[[], Tensor]] = {
                "microbatch": lambda: x.mean(0),
                "parameter": lambda: self.layer.weight.sum(1),
                "written buffer": lambda: self.count + torch.zeros(WIDTH),
                "random": lambda: torch.rand(WIDTH),
            }
            self.last = made[self.what]()
        return torch.tanh(h) + self.last


@pytest.mark.parametrize("what", ["microbatch", "parameter", "written buffer", "random"])
def test_what_first_forwards_alone_can_make(what: str) -> None:
    case = Problem(Carrying(what), squares, (numbers(4, WIDTH),))
    message = refusal(case)
    assert message.startswith(
        f"the model makes last (set at {line_of(Carrying.forward, 'self.last = ')}) in its first forward and finds it "
        f"in the next, made from the microbatch"
    )
    assert "Make it in __init__ (register_buffer), or run the model once before compile" in message
    with torch.no_grad():
        case.model(case.inputs[0][:2])
    expected = reference(case, 2)
    step = compiled(case, 2, 2).run_local()
    loss = step(*case.inputs)
    assert_same((loss, {name: p.grad for name, p in step.named_parameters()}), expected, 1e-6)


class ByMode(nn.Module):
    """A constant for each mode, the first of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.tables = {True: torch.ones(WIDTH), False: torch.full((WIDTH,), 3.0)}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.tables[self.training] * self.tables[self.training].cos()


def test_each_graph_has_its_own_constants() -> None:
    case = Problem(ByMode(), squares, (numbers(4, WIDTH),))
    expected = reference(case, 2)
    step = compiled(case, 1, 2).run_local()
    loss = step(*case.inputs)
    assert_same((loss, {name: p.grad for name, p in step.named_parameters()}), expected, 1e-6)
    evaluated = step.evaluate(*case.inputs)
    with torch.no_grad():
        assert torch.allclose(evaluated, squares(case.model.eval()(*case.inputs)))


@functools.cache
def table() -> Tensor:
    return torch.arange(float(WIDTH)).cos()


class Elsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * table()


def test_tables_kept_outside_of_modules() -> None:
    case = Problem(Elsewhere(), squares, (numbers(4, WIDTH),))
    table.cache_clear()
    try:
        message = refusal(case)
        assert "made and kept outside of its modules' attributes (functools.cache, a global, an object)" in message
        assert "Clear it (cache_clear()), and make the tensor in __init__" in message
        table.cache_clear()
        expected = reference(case, 2)  # fills it
        step = compiled(case, 2, 2).run_local()
        loss = step(*case.inputs)
        assert_same((loss, {name: p.grad for name, p in step.named_parameters()}), expected, 1e-6)
    finally:
        table.cache_clear()


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()), "0.weight, 0.bias get"),
        (
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyBatchNorm1d(affine=False)),
            "1.running_mean, 1.running_",
        ),
    ],
)
def test_lazy_modules(make: Callable[[], nn.Module], names: str) -> None:
    case = Problem(make(), squares, (numbers(4, WIDTH),))
    message = refusal(case)
    assert message.startswith(names)
    assert "Run the model once before compile" in message
    case.model(*case.inputs)
    expected = reference(case, 2)
    step = compiled(case, 1, 2).run_local()
    loss = step(*case.inputs)
    assert_same((loss, {name: p.grad for name, p in step.named_parameters()}), expected, 1e-6)
