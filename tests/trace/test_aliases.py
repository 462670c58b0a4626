"""Tensors of a model that share memory."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import zbfx
from tests.support.models import Problem
from tests.support.reference import compiled
from zbfx.trace.aliases import overlapping, refuse_apart, refuse_written

ROWS, WIDTH, MICROBATCHES = 2, 8, 3


def problem_of(model: nn.Module) -> Problem:
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, ROWS * MICROBATCHES, WIDTH, dtype=torch.float64).unbind()
    return Problem(model.double(), nn.functional.mse_loss, (inputs,), (targets,))


def test_pairs_that_have_bytes_in_common() -> None:
    flat = torch.zeros(12)
    named = {
        "whole": flat,
        "left": flat[:6],
        "right": flat[6:],
        "transposed": flat.view(3, 4).t(),
        "alone": torch.zeros(12),
        "same": flat,
        "none": flat[:0],
        "meta": torch.zeros(12, device="meta"),
    }
    of_whole = [("whole", "left"), ("whole", "right"), ("whole", "transposed")]
    assert overlapping(named) == [*of_whole, ("left", "transposed"), ("right", "transposed")]


class Viewed(nn.Module):
    """Reads a view of a buffer that it has written into."""

    stats: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("stats", torch.zeros(2, WIDTH, dtype=torch.float64))
        self.register_buffer("mean", self.stats[0])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.stats.add_(x.mean(0))
        return self.linear(x) - self.mean.clone()


def test_writes_that_another_name_would_not_see_are_refused() -> None:
    model = Viewed()
    model.mean = model.stats[0]
    with pytest.raises(zbfx.TraceError) as caught:
        compiled(problem_of(model), 1, MICROBATCHES)
    assert str(caught.value) == (
        "the model writes into stats, which shares memory with mean: the graph holds two tensors, and would read mean "
        "as it was. Give each its own memory (.clone()), or take the view in the forward"
    )


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x).tanh())


def test_shared_memory_on_two_ranks_is_refused_and_on_one_is_not() -> None:
    model = Transposed().double()
    model.decoder.weight = nn.Parameter(model.encoder.weight.t())
    pipe = compiled(problem_of(model), 2, MICROBATCHES)
    named: dict[str, Tensor] = dict(model.named_parameters())
    holders = {name: (0 if "encoder" in name else 1,) for name in named}
    with pytest.raises(zbfx.ZbfxError) as caught:
        refuse_apart(named, holders, pipe.compiled.joint)
    assert str(caught.value).startswith(
        "encoder.weight and decoder.weight share memory, and are used on ranks 0, 1: each of them would change only "
    )
    refuse_apart(named, dict.fromkeys(named, (1,)), pipe.compiled.joint)
    refuse_written(named, pipe.compiled.joint)  # a step changes no parameter


def test_spectral_norm_before_its_first_forward() -> None:
    """Its `weight` begins as another name of the parameter, whose values a step must leave as they are."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.ReLU(), normed)
    problem, plain = problem_of(model), copy.deepcopy(model)
    (inputs,), (targets,) = problem.inputs, problem.targets
    step = compiled(problem, 2, MICROBATCHES).run_local()
    before = model.get_parameter("2.weight_orig").detach().clone()
    for _ in range(2):
        found = step(inputs, targets)
        pairs = zip(inputs.split(ROWS), targets.split(ROWS), strict=True)
        expected = torch.stack([nn.functional.mse_loss(plain(x), y) for x, y in pairs]).mean()
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    assert torch.equal(model.get_parameter("2.weight_orig"), before)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-14)
