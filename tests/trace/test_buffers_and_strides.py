"""Buffers that a stage writes, and operators whose results have other strides than the tracer believes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import Problem, mean_squares, numbers, squares
from tests.support.reference import TRACES, assert_same, compiled, default_dtype, one_trace, reference, stepped
from zbfx.errors import ZbfxError

TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        yield


class Remembering(nn.Module):
    """Writes what it saw last into a buffer that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last: Tensor
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.before(x))
        result = torch.tanh(self.after(hidden))
        self.last.copy_(result.detach().mean(0))
        return result * hidden


class NormedTwice(nn.Module):
    """One batch norm at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.norm(self.second(self.norm(self.first(x)))))


@cache
def made(model: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    """A model that is cut in several ways."""
    return model(*arguments)


def agree(problem: Problem, stages: int, cuts: Sequence[str] | None = None) -> None:
    """Gradients, loss and buffers of two microbatches."""
    eager = copy.deepcopy(problem.model)
    expected = reference(problem, 2, eager)
    with one_trace(TRACES):
        pipe = compiled(problem, stages, 2, cuts=cuts)
    assert_same(stepped(problem, pipe), expected, TOLERANCE)
    buffers = dict(problem.model.named_buffers())
    assert all(torch.allclose(buffers[name], wanted) for name, wanted in eager.named_buffers())


def test_buffer_written_and_never_read_on_a_stage_that_receives() -> None:
    agree(Problem(Remembering(), squares, (numbers(4, 4),)), 2, cuts=["after"])


def test_balanced_cuts_keep_all_uses_of_a_batch_norm_together() -> None:
    agree(Problem(NormedTwice(), squares, (numbers(8, 4),)), 2)


def test_cut_between_two_uses_of_a_batch_norm_is_refused() -> None:
    problem = Problem(NormedTwice(), squares, (numbers(8, 4),))
    with pytest.raises(
        ZbfxError, match="'second' begins between the first read of a buffer and its last write"
    ) as found:
        compiled(problem, 2, 2, cuts=["second"])
    assert "test_buffers_and_strides.py" in str(found.value)
    assert "Cut before its first use or after its last" in str(found.value)
    agree(problem, 2, cuts=["third"])


class Lagging(nn.Module):
    """Reads, at its end, a buffer whose next value it knows at its start (`of` what)."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.last: Tensor
        self.register_buffer("last", torch.ones(4, 4))  # of a microbatch

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        hidden = result = first(x)
        for layer in others:
            result = torch.tanh(layer(result))
        seen = self.last.reshape(2, 8).t().reshape(4, 4) if self.of == "view" else self.last
        result = result + seen
        self.last.copy_(x * 2 if self.of == "input" else hidden.detach())
        return result


@pytest.mark.slow
@pytest.mark.parametrize("of", ["hidden", "view", "input"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_buffer_whose_next_value_is_known_before_it_is_read(of: str, stages: int) -> None:
    """Microbatch by microbatch, whatever is cut between them, and whichever stage is ahead."""
    agree(Problem(made(Lagging, of), squares, (numbers(8, 4),)), stages)


class Averaged(nn.Module):
    """Takes away a mean of the inputs of training, read whole or through views."""

    def __init__(self, *, views: bool) -> None:
        super().__init__()
        self.views, self.linear = views, nn.Linear(4, 4)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + self.linear(x).relu() - (self.mean.view(1, 4).expand(x.shape) if self.views else self.mean)


@pytest.mark.slow
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_evaluation_of_buffers_that_only_training_writes(views: bool, stages: int) -> None:
    """A cut through a module may leave the buffer in one stage, and what reads it in evaluation in the next."""
    problem = Problem(nn.Sequential(*(Averaged(views=views) for _ in range(4))), squares, (numbers(8, 4),))
    eager = copy.deepcopy(problem.model)
    step = compiled(problem, stages, 2).run_local()
    for rows in problem.inputs[0].split(4):
        eager(rows)
    step(*problem.inputs)
    eager.eval()
    expected = torch.stack([squares(eager(rows)) for rows in problem.inputs[0].split(4)]).mean()
    assert torch.allclose(step.evaluate(*problem.inputs), expected, rtol=TOLERANCE, atol=0.0)


def test_a_cut_may_begin_with_a_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
    agree(Problem(model, squares, (numbers(4, 4),)), 2, cuts=["1"])


class GroupNormOfTransposed(nn.Module):
    """Its group norm gets a gradient from a mean squared error of values in another order than the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2) * x


@pytest.mark.parametrize("stages", [1, 2])
def test_group_norm_with_a_gradient_of_other_strides(stages: int) -> None:
    agree(Problem(made(GroupNormOfTransposed), mean_squares, (numbers(4, 3, 4),), (numbers(4, 3, 4, seed=2),)), stages)


class ViewOfNormed(nn.Module):
    """A linear layer, which views its input as a matrix, of what a batch norm gave a transposed input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.last(self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2) + x)))


@pytest.mark.parametrize("stages", [1, 2])
def test_view_of_a_value_of_other_strides(stages: int) -> None:
    agree(Problem(made(ViewOfNormed), mean_squares, (numbers(4, 3, 4),), (numbers(4, 3, 4, seed=2),)), stages)


class AttentionOfNormed(nn.Module):
    """Fused attention, which reads its last dimension as dense, of what a batch norm gave a transposed input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.norm(x.transpose(1, 2)).transpose(1, 2)[:, None]
        return self.linear(F.scaled_dot_product_attention(queries, x[:, None], x[:, None])[:, 0])


@pytest.mark.parametrize("stages", [1, 2])
def test_attention_of_a_value_of_other_strides(stages: int) -> None:
    agree(Problem(made(AttentionOfNormed), mean_squares, (numbers(4, 3, 4),), (numbers(4, 3, 4, seed=2),)), stages)


class AttentionOfTurned(nn.Module):
    """The batch is not the outermost dimension in memory: no memory format of torch's has such strides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        turned = (self.linear(x).transpose(0, 1).contiguous() * 2).transpose(0, 1)
        y = self.norm(turned.transpose(1, 2)).transpose(1, 2)[:, None]
        return F.scaled_dot_product_attention(y, y, y)[:, 0]


class AttentionOfParts(nn.Module):
    """Queries, keys and values are parts of what a batch norm gave a transposed input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(12), nn.Linear(4, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)[:, None]
        return F.scaled_dot_product_attention(*y.chunk(3, -1))[:, 0]


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("model", [AttentionOfTurned, AttentionOfParts])
def test_attention_of_values_of_strides_without_a_format(model: Callable[[], nn.Module], stages: int) -> None:
    agree(Problem(made(model), mean_squares, (numbers(4, 3, 4),), (numbers(4, 3, 4, seed=2),)), stages)


class RotationOfNormed(nn.Module):
    """Pairs of numbers, dense in memory, are taken for complex ones: of what a batch norm gave a transposed input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.angles = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Parameter(numbers(2))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)
        pairs = normed.contiguous().unflatten(-1, (2, 2))  # which does nothing to strides that the tracer believes in
        turned = torch.view_as_complex(pairs) * torch.polar(torch.ones(2), self.angles)
        return self.linear(torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("stages", [1, 2])
def test_complex_view_of_a_value_of_other_strides(stages: int) -> None:
    agree(Problem(made(RotationOfNormed), mean_squares, (numbers(4, 3, 4),), (numbers(4, 3, 4, seed=2),)), stages)
