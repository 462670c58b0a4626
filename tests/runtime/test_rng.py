"""Dropout in a pipeline: masks depend on the seed, the step, the microbatch and the place in the model alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import Problem, numbers, squares
from tests.support.reference import assert_same, compiled, stepped
from zbfx import TraceError, ZbfxError, rng
from zbfx.graphs import Role
from zbfx.plan import Kind

pytestmark = pytest.mark.usefixtures("known_traces")

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


class Dropouts(nn.Module):
    """Four blocks with dropout; with `recompute`, each is run again in the backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def problem(microbatches: int, recompute: bool = False) -> Problem:
    return Problem(Dropouts(recompute), squares, (numbers(2 * microbatches, WIDTH),))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_masks_depend_neither_on_the_schedule_nor_on_the_cuts(recompute: bool) -> None:
    given = problem(3, recompute)
    expected = stepped(given, compiled(given, 1, 3, schedule="gpipe"), seed=7)
    for stages, schedule in [(1, "zb-h1"), (2, "1f1b"), (3, "gpipe"), (4, "zb-h1")]:
        assert_same(stepped(given, compiled(given, stages, 3, schedule=schedule), seed=7), expected, 0.0)


@pytest.mark.slow
def test_recomputed_dropout_draws_what_the_first_one_drew() -> None:
    stored, again = problem(3), problem(3, recompute=True)
    expected = stepped(stored, compiled(stored, 3, 3), seed=7)
    pipe = compiled(again, 3, 3)
    assert_same(stepped(again, pipe, seed=7), expected, 0.0)
    assert all(stage.phases[Kind.B].is_random for stage in pipe.stages)


class ParallelDropouts(nn.Module):
    """Two checkpointed branches that drop entries of one value, or of a copy each."""

    def __init__(self, copies: bool, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.branches = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.copies, self.recompute = copies, recompute

    def branch(self, x: Tensor, linear: nn.Module) -> Tensor:
        return nn.functional.dropout(x.clone() if self.copies else x, 0.5) * torch.tanh(linear(x))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        if not self.recompute:
            return self.branch(h, self.branches[0]) - self.branch(h, self.branches[1])
        first, second = (checkpoint(self.branch, h, linear, use_reentrant=False) for linear in self.branches)
        return first - second


@pytest.mark.slow
def test_draws_that_cannot_be_told_apart_are_refused() -> None:
    given = Problem(ParallelDropouts(copies=False, recompute=True), squares, (numbers(6, WIDTH),))
    with pytest.raises(TraceError, match="draws more than once from one value") as caught:
        compiled(given, 2, 3)
    assert "test_rng.py:" in str(caught.value)
    stored = replace(given, model=ParallelDropouts(copies=False, recompute=False))
    assert_same(stepped(stored, compiled(stored, 2, 3)), stepped(stored, compiled(stored, 1, 3)), 0.0)


def test_recomputing_holds_less_between_forward_and_backward() -> None:
    stored, again = (compiled(problem(1, recompute), 2, 1) for recompute in (False, True))
    held = [[stage.stored_bytes(stage.saved) for stage in pipe.stages] for pipe in (stored, again)]
    assert all(less < more for more, less in zip(*held, strict=True))


class Masks(nn.Module):
    """The gradient of `weight` is the sum of the dropout masks of its microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.weight * x, 0.5).sum()


def masks(microbatches: int, seed: int = 7, steps: int = 1) -> list[Tensor]:
    model = Masks()
    step = compiled(Problem(model, None, (torch.ones(microbatches, 64),)), 1, microbatches).run_local(seed=seed)
    found = []
    for _ in range(steps):
        model.zero_grad()
        step(torch.ones(microbatches, 64))
        assert model.weight.grad is not None
        found.append(model.weight.grad)
    return found


def test_masks_differ_between_microbatches_steps_and_seeds() -> None:
    first, second = masks(1, steps=2)
    assert set(first.tolist()) == {0.0, 2.0}
    assert not torch.equal(first, second)
    assert torch.equal(masks(1)[0], first)
    assert not torch.equal(masks(1, seed=8)[0], first)
    assert set(masks(2)[0].tolist()) == {0.0, 1.0, 2.0}  # two masks, each weighted by a half


def test_masks_go_on_where_training_resumes() -> None:
    given = problem(2)
    straight = compiled(given, 2, 2).run_local(seed=7)
    expected = [straight(*given.inputs) for _ in range(4)]
    resumed = compiled(given, 2, 2).run_local(seed=7)
    resumed.count = 2
    assert [resumed(*given.inputs) for _ in range(2)] == expected[2:]
    assert expected[0] != expected[2]


class DropsAlways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropouts = Dropouts()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.dropouts(x), 0.5)  # in eval mode too


@pytest.mark.slow
def test_evaluations_leave_training_alone() -> None:
    given = Problem(DropsAlways(), squares, (numbers(4, WIDTH),))
    pipe = compiled(given, 2, 2)
    alone, step = pipe.run_local(seed=7), pipe.run_local(seed=7)
    expected = [alone(*given.inputs) for _ in range(3)]
    found, evaluated = [], [step.evaluate(*given.inputs)]
    for _ in range(3):
        found.append(step(*given.inputs))
        losses, verdict, random = step.losses, step.verdict, torch.get_rng_state()
        gradients = [p.grad for p in step.parameters()]
        evaluated += [step.evaluate(*given.inputs), step.evaluate(*given.inputs)]
        assert step.losses is losses
        assert step.verdict is verdict
        assert torch.equal(torch.get_rng_state(), random)
        assert all(p.grad is grad for p, grad in zip(step.parameters(), gradients, strict=True))
    assert found == expected
    assert step.count == alone.count == 3
    assert step.engine.runs == alone.engine.runs
    assert evaluated[1::2] == evaluated[2::2]  # of one step, the same each time
    assert len({float(loss) for loss in evaluated}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("value", ["a", 2.5, -1, True, None])
def test_count_is_a_number_of_steps(value: Any) -> None:
    step = compiled(problem(1), 1, 1).run_local()
    with pytest.raises(ZbfxError, match=f"count is the number of training steps so far, an integer >= 0; .* {value!r}"):
        step.count = value
    assert step.count == 0


def test_seed_follows_torch() -> None:
    model = Masks()
    pipe = compiled(Problem(model, None, (torch.ones(1, 64),)), 1, 1)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model.zero_grad()
        pipe.run_local()(torch.ones(1, 64))
        found.append(model.weight.grad)
    assert torch.equal(found[0], found[1])  # type: ignore[arg-type]
    assert not torch.equal(found[0], found[2])  # type: ignore[arg-type]


def test_a_step_leaves_the_global_generator_alone() -> None:
    given = problem(2)
    step = compiled(given, 2, 2).run_local()
    before = torch.get_rng_state()
    step(*given.inputs)
    assert torch.equal(torch.get_rng_state(), before)


class RandomInForward(nn.Module):
    """Noise from every kind of factory, on one side of a cut and the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) + torch.randn_like(x) + torch.rand(WIDTH)
        return torch.tanh(self.second(h * torch.bernoulli(torch.full((WIDTH,), 0.5)))) * torch.normal(0.0, 1.0, (2, 1))


def test_noise_of_every_kind_is_fixed_by_the_seed() -> None:
    given = Problem(RandomInForward(), squares, (numbers(6, WIDTH),))
    expected = stepped(given, compiled(given, 1, 3, schedule="gpipe"), seed=7)
    found = stepped(given, compiled(given, 2, 3), seed=7)
    assert_same(found, expected, 0.0)
    other = stepped(given, compiled(given, 2, 3), seed=8)
    assert other[0] != expected[0]


def test_gradient_belongs_to_the_mask_of_its_forward() -> None:
    """The loss is linear in the weight, so that the gradient predicts exactly what a larger weight does to it."""
    model = Masks()
    pipe = compiled(Problem(model, None, (torch.ones(1, 64),)), 1, 1)
    loss = pipe.run_local(seed=7)(torch.ones(1, 64))
    assert model.weight.grad is not None
    assert loss == model.weight.grad.sum()


def test_streams_and_seeds_are_spread_out() -> None:
    values = {rng.mix(seed, step, microbatch) for seed in range(4) for step in range(4) for microbatch in range(4)}
    assert len(values) == 64
    assert all(0 <= value < 1 << 63 for value in values)
    assert rng.mix(1, 2) != rng.mix(2, 1)
    assert rng.stream_number("bernoulli") != rng.stream_number("bernoulli_1")


class Seeded(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def test_seed_is_an_input_of_random_phases_only() -> None:
    given = replace(problem(1), model=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)))
    pipe = compiled(given, 2, 1)
    assert [phase.is_random for stage in pipe.stages for phase in stage.phases.values()] == [False] * 8
    assert pipe.stages[0].phases[Kind.F].port_names(Role.INPUT) == ("inputs[0]",)
