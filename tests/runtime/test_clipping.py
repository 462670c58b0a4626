"""Clipping in one process, where all gradients are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zbfx
from tests.support.models import gpt2, mlp
from tests.support.reference import compiled, default_dtype, loss_of, shared, shared_problem
from zbfx import ZbfxError

double = default_dtype(torch.float64)


@double
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e6, 0.0, float("inf")])
def test_clipping_equals_torch(max_norm: float, norm_type: float) -> None:
    """Of a model with a tied parameter that two ranks hold, and a parameter without gradient."""
    problem = shared_problem(gpt2, 2, torch.float64)
    problem.model.zero_grad()
    plain = copy.deepcopy(problem.model)
    step = shared(gpt2, 2, 2).run_local()
    step(*problem.inputs, *problem.targets)
    loss_of(problem, plain, problem.inputs, problem.targets, {}).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    found = step.clip_grad_norm_(max_norm, norm_type)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert found.dtype == expected.dtype
    wanted = dict(plain.named_parameters())
    for name, parameter in step.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-10, atol=1e-14)


def test_without_gradients_the_norm_is_zero() -> None:
    assert compiled(mlp(2), 2, 2).run_local().clip_grad_norm_(1.0).item() == 0.0


def test_complex_gradients() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).abs().square().mean()

    model, x = Complex(), torch.randn(4, 3, dtype=torch.complex64)
    step = zbfx.compile(model, stages=1, microbatches=2, example_inputs=(x[:2],), schedule="gpipe").run_local()
    step(x)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert step.clip_grad_norm_(1e-3).item() == pytest.approx(expected.item(), rel=1e-5)
    clipped = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert clipped.item() == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("wrong", [(-1.0, 2.0), (float("nan"), 2.0), (1.0, 0.0), (1.0, -1.0), ("a", 2.0), (None, 2.0)])
def test_wrong_norms_are_refused(wrong: tuple[Any, Any]) -> None:
    with pytest.raises(ZbfxError, match=r"max_norm"):
        shared(mlp, 2, 2).run_local().clip_grad_norm_(*wrong)
