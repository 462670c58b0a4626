"""Steps of optimizers undone by arithmetic, and what has no inverse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import zbfx
from tests.support.models import mlp
from tests.support.optimizers import INVERTIBLE, OPTIMIZERS, train
from tests.support.reference import compiled
from zbfx.memory.predict import available_bytes
from zbfx.optim import PostValidated, inverse, undo
from zbfx.optim.inverse import Arithmetic, obstacle_of
from zbfx.optim.undo import Undo

SIZE = 1000
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-53}


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.nn.Parameter(torch.randn(SIZE, generator=generator).to(dtype)) for _ in range(2)]
    for parameter in found:
        parameter.grad = torch.randn(SIZE, generator=generator).to(dtype)
    return found


def numbers_of(optimizer: torch.optim.Optimizer, values: list[torch.nn.Parameter]) -> dict[str, Tensor]:
    """Parameters and state, copied."""
    found = {str(k): p.detach().clone() for k, p in enumerate(values)}
    for k, p in enumerate(values):
        found |= {f"{k} {key}": v.clone() for key, v in optimizer.state.get(p, {}).items() if isinstance(v, Tensor)}
    return found


@pytest.mark.parametrize("dtype", list(EPS))
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", INVERTIBLE)
def test_a_step_comes_back_within_a_few_roundings(name: str, steps: int, dtype: torch.dtype) -> None:
    """Each number within 8 roundings of the numbers it was computed from: its own before and after, and what was added
    or taken away."""
    values = parameters(dtype)
    optimizer = OPTIMIZERS[name](values)
    for _ in range(steps):
        optimizer.step()
    before = numbers_of(optimizer, values)
    way = Arithmetic()
    way.save(optimizer, list(values))
    optimizer.step()
    after = numbers_of(optimizer, values)
    gradients = {id(p): p.grad for p in values if p.grad is not None}
    way.restore(optimizer, optimizer.param_groups, gradients)
    found = numbers_of(optimizer, values)
    assert found.keys() == before.keys()
    for key, expected in before.items():
        gradient = gradients[id(values[int(key[0])])].abs().double()
        scale = (
            expected.abs().double() + after[key].abs().double() + (gradient + gradient**2 + 0.1 if " " in key else 0)
        )
        assert ((found[key].double() - expected.double()).abs() <= 8 * EPS[dtype] * scale).all(), key
    if steps == 0 and name != "sgd":
        assert set(found) == {"0", "1"}  # the state that the step made is gone


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_copy_comes_back_in_bits(name: str) -> None:
    for steps in (0, 2):
        values = parameters(torch.float32)
        optimizer = OPTIMIZERS[name](values)
        for _ in range(steps):
            optimizer.step()
        before, way = numbers_of(optimizer, values), Undo()
        way.save(optimizer, values)
        states = [optimizer.state.get(p, {}).get("exp_avg") for p in values]
        optimizer.step()
        way.restore(optimizer)
        found = numbers_of(optimizer, values)
        assert found.keys() == before.keys()
        assert all(torch.equal(found[key], value) for key, value in before.items())
        assert all(optimizer.state.get(p, {}).get("exp_avg") is s for p, s in zip(values, states, strict=True))
        assert way.bytes == sum(value.nbytes for value in before.values())
        assert bool(optimizer.state) == (steps > 0 and name != "sgd")


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters(torch.float32), **options)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (adam(amsgrad=True), "amsgrad keeps the largest second moment"),
        (adam(betas=(0.0, 0.9)), "a beta of 0 forgets the moment"),
        (adam(differentiable=True), "part of a graph"),
        (torch.optim.AdamW(parameters(torch.float32), lr=0.5, weight_decay=2.0), r"lr \* weight_decay is 1"),
        (torch.optim.SGD(parameters(torch.float32), lr=0.5, weight_decay=2.0), r"lr \* weight_decay is 1"),
        (torch.optim.RMSprop(parameters(torch.float32)), "RMSprop has no inverse"),
        (torch.optim.SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=0.1), "complex"),
    ],
)
def test_what_has_no_inverse_says_why(optimizer: torch.optim.Optimizer, reason: str) -> None:
    assert obstacle_of(optimizer, optimizer.param_groups) is not None
    with pytest.raises(zbfx.ZbfxError, match=reason):
        inverse.checked_rollback("arithmetic", optimizer)


class Halving(torch.optim.Optimizer):
    """Halves every parameter that has a gradient."""

    def __init__(self, values: Any) -> None:
        super().__init__(values, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.5)


def double(group: Any, parameter: Tensor, gradient: Tensor, state: Any, first: bool) -> None:
    parameter.mul_(2.0)


@pytest.fixture
def registered() -> Iterator[None]:
    zbfx.optim.register_inverse(Halving, double)
    yield
    del inverse.INVERSES[Halving]


@pytest.mark.usefixtures("registered")
def test_an_inverse_of_ones_own() -> None:
    results = {}
    problem = mlp(3)
    pipe, first = compiled(problem, 3, 3), {n: v.clone() for n, v in problem.model.state_dict().items()}
    for sync in (True, False):
        problem.model.load_state_dict(first)
        results[sync] = train(problem, pipe.run_local(), 3, Halving, max_norm=0.15, rollback="arithmetic", sync=sync)
    assert results[False].counts["rolled_back"] > 0
    for name, parameter in results[True].parameters.items():
        assert torch.equal(results[False].parameters[name], parameter)


def test_the_way_back_follows_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a copy; arithmetic where memory is full, if it can be; a copy all the same where it is asked for."""
    assert available_bytes() > 2**20
    problem = mlp(3)
    pipe = compiled(problem, 3, 3)
    for rollback, name, free, copied in (
        (None, "adamw", 1e12, True),
        (None, "adamw", 0.0, False),
        (None, "amsgrad", 0.0, True),
        ("exact", "adamw", 0.0, True),
    ):
        monkeypatch.setattr(undo, "available_bytes", lambda free=free: free)
        step = pipe.run_local()
        optimizer = PostValidated(OPTIMIZERS[name](step.parameters()), step, rollback=rollback)
        step(*problem.inputs, *problem.targets)
        optimizer.step()
        assert {way.bytes > 0 for way in optimizer.undos.values()} == {copied}
        assert bool(optimizer.inverses) is not copied
        optimizer.settle()


def test_a_scheduler_that_leads_where_nothing_comes_back_gets_a_copy() -> None:
    problem = mlp(3)
    step = compiled(problem, 3, 3).run_local()
    inner = torch.optim.AdamW(step.parameters(), lr=0.1, weight_decay=2.0)
    optimizer = PostValidated(inner, step, max_norm=0.15, rollback="arithmetic", sync=False)
    for lr in (0.1, 0.5):
        inner.param_groups[0]["lr"] = lr
        step(*problem.inputs, *problem.targets)
        optimizer.step()
        assert {way.bytes > 0 for way in optimizer.undos.values()} == {lr == 0.5}
        optimizer.settle()
    assert optimizer.counts.rolled_back == 2
