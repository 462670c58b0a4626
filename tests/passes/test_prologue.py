"""What no microbatch changes is computed once a step: which values, in which prologues, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbfx
from tests.support.models import Problem, mean_squares, numbers
from tests.support.reference import compiled
from zbfx.graphs import Phase, Role, Stage
from zbfx.passes import prologue as prologues
from zbfx.plan import Kind

aten = torch.ops.aten
P, F, B, W = Kind.P, Kind.F, Kind.B, Kind.W
WIDTH = 6


def problem_of(model: nn.Module, loss_fn: Callable[..., Tensor] = mean_squares) -> Problem:
    return Problem(model, loss_fn, (numbers(8, WIDTH),), (numbers(8, WIDTH, seed=2),))


def under_autocast(problem: Problem, stages: int = 2, **options: Any) -> zbfx.Pipeline:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return compiled(problem, stages, 4, **{"check": False, **options})


def calls(phase: Phase, target: Any) -> int:
    return len(phase.module.graph.find_nodes(op="call_function", target=target))


def layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def made_once(stages: tuple[Stage, ...], target: Any) -> tuple[int, int]:
    """Nodes of this operator in all prologues, and in all other phases."""
    once = sum(calls(stage.phases[P], target) for stage in stages)
    return once, sum(calls(phase, target) for stage in stages for k, phase in stage.phases.items() if k is not P)


def test_weights_are_cast_in_prologues_and_nowhere_else() -> None:
    """Of 4 layers 8 casts a step, in place of one in each phase that reads them: 8 in Fs, 3 in Bs."""
    pipe, without = (under_autocast(problem_of(layers(4)), prologue=on) for on in (True, False))
    casts = {one: made_once(one.stages, aten._to_copy.default) for one in (pipe, without)}
    assert casts[pipe][0] == 8
    assert casts[without] == (0, casts[pipe][1] + 8 + 3)
    for stage in pipe.stages:
        assert {port.role for port in stage.phases[P].ports} == {Role.PARAMETER}
        assert Role.PARAMETER not in {port.role for kind in (F, B) for port in stage.phases[kind].ports}
        assert stage.kept_bytes == 2 * 2 * (WIDTH * WIDTH + WIDTH)
        assert not stage.kept & stage.saved
    assert not any(stage.kept or stage.phases[P].results for stage in without.stages)
    assert not without.compiled.has_prologues


def test_without_anything_to_keep_prologues_are_empty_and_not_called() -> None:
    pipe = compiled(problem_of(layers(3)), 2, 4)
    assert all(stage.phases[P].is_empty for stage in pipe.stages)
    assert "self.P" not in "".join(program.code for program in pipe.programs)


class Repeated(nn.Module):
    """A checkpointed layer, whose backward casts the weight once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return torch.tanh(self.second(torch.tanh(self.first(x))))

        found: Tensor = checkpoint(part, x, use_reentrant=False)
        return found


def test_checkpointed_casts_are_one() -> None:
    pipe = under_autocast(problem_of(Repeated()), 1)
    assert calls(pipe.stages[0].phases[P], aten._to_copy.default) == 4


class Rotary(nn.Module):
    """A table made of a buffer by a matrix product, read in every layer; and weight normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.register_buffer("frequency", torch.arange(1.0, WIDTH + 1)[None])

    def forward(self, x: Tensor) -> Tensor:
        table = torch.cos(torch.arange(2.0)[:, None] @ self.get_buffer("frequency"))
        for layer in self.layers:
            x = torch.tanh(layer(x)) * table
        return x


def test_tables_and_normalised_weights_are_made_once_in_each_stage_that_reads_them() -> None:
    torch.manual_seed(0)
    pipe = compiled(problem_of(Rotary()), 2, 4, cuts=["layers.2"])
    for stage in pipe.stages:
        assert calls(stage.phases[P], aten.cos.default) == 1
        assert calls(stage.phases[P], aten._weight_norm_interface.default) == 2
        assert not any(calls(stage.phases[kind], aten.cos.default) for kind in (F, B, W))
        backward = sum(calls(stage.phases[k], aten._weight_norm_interface_backward.default) for k in (F, B, W))
        assert backward == 2
    sent = {name for message in pipe.programs[0].messages.values() for name in message.names}
    assert not sent & pipe.stages[1].kept, "the table is not sent"


class Left(nn.Module):
    """What stays in the phases: see the tests."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part, self.layers = part, layers(2)
        self.register_buffer("count", torch.ones(()))
        self.slopes = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)  # type: ignore[index]
        match self.part:
            case "written":
                self.get_buffer("count").add_(1)
                x = x * torch.cos(self.get_buffer("count"))
            case "random":
                x = x * nn.functional.dropout(self.slopes.cos(), 0.5)
            case "large":
                x = x + (self.slopes * torch.ones(1200, 1)).sum()
            case "input":
                x = x * torch.cos(x[:1, :1] * 0 + self.slopes)
        return self.layers[1](x)  # type: ignore[index]


@pytest.mark.parametrize("part", ["written", "random", "large", "input"])
def test_what_microbatches_change_or_is_too_large_stays(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that the model writes, random numbers, a table larger than its limit, and what comes of an input."""
    monkeypatch.setattr(prologues, "TABLE_BYTES", 1000)
    (stage,) = compiled(problem_of(Left(part)), 1, 4, check=False).stages
    for name in stage.kept:
        assert stage.stored_bytes([name]) <= 1000
    assert made_once((stage,), aten.cos.default)[0] == (part == "random")  # of the parameter, before the draw
    assert not {Role.INPUT} & {port.role for port in stage.phases[P].ports}


@torch.library.custom_op("zbfx_test_prologue::noise", mutates_args=())
def noise(weight: Tensor) -> Tensor:
    return torch.rand_like(weight)


@noise.register_fake
def _(weight: Tensor) -> Tensor:
    return torch.empty_like(weight)


class Noisy(nn.Module):
    """Two draws a microbatch, by an operator that does not say that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        fixed = self.weight.detach()
        return x * self.weight + noise(fixed) - noise(fixed)


def test_operators_of_other_libraries_run_in_every_microbatch() -> None:
    stages = compiled(problem_of(Noisy()), 1, 4, check=False).stages
    assert made_once(stages, torch.ops.zbfx_test_prologue.noise.default) == (0, 2)
