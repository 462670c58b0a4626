"""Microbatches and loss."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zbfx
from tests.cases.common import TOLERANCE, WIDTH, check, layers, linears
from tests.support.models import Problem, mean_squares, numbers, squares
from tests.support.reference import TRACES, assert_same, compiled, gradients, one_trace, reference, stepped
from zbfx import InputError, Kind


def token_sum(logits: Tensor, targets: Tensor) -> Any:
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()


@pytest.mark.slow
def test_case_40_ignored_tokens_weigh_nothing() -> None:
    """Equal to one process on the whole batch, however the ignored tokens fall into microbatches."""
    for labels in ([1, 2, -100, 0], [-100, -100, 3, 1], [0, -100, -100, -100], [1, 2, 3, 4]):
        targets = torch.tensor(labels)
        problem = Problem(layers(3), token_sum, (numbers(4, WIDTH),), (targets,))
        whole = copy.deepcopy(problem.model)
        loss = F.cross_entropy(whole(problem.inputs[0]), targets, ignore_index=-100)
        loss.backward()
        for stages in (1, 2):
            found = stepped(problem, compiled(problem, stages, 2))
            assert_same(found, (loss.detach(), gradients(whole)), TOLERANCE)


def test_case_40_count_beside_random_numbers() -> None:
    """Dropout in the model leaves the count a function of the targets alone."""
    targets = torch.tensor([1, -100, 2, 3])
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    problem = Problem(model, token_sum, (numbers(4, WIDTH),), (targets,))
    count = compiled(problem, 2, 2).compiled.reduction.count
    assert count is not None
    assert count.inputs == ("targets[0]",)
    assert [int(count({"targets[0]": part})) for part in targets.split(2)] == [1, 2]


def test_case_40_counts_of_two_steps_of_one_pipeline() -> None:
    """Steps that take turns share their programs, not what a batch counts for."""
    model = nn.Linear(WIDTH, WIDTH)
    few, many = torch.tensor([1, -100, -100, -100]), torch.tensor([1, 2, 3, 4])
    x = numbers(4, WIDTH)
    pipe = compiled(Problem(model, token_sum, (x,), (many,)), 1, 2)
    steps = {targets: pipe.run_local() for targets in (few, many)}
    for _ in range(2):
        for targets, step in steps.items():
            expected = F.cross_entropy(model(x), targets, ignore_index=-100).detach()
            assert float(step(x, targets)) == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 1.0), ("sum", 3.0)])
def test_case_40_reduction_is_explicit(reduction: str, factor: float) -> None:
    problem = Problem(layers(3), squares, (numbers(6, WIDTH),))
    loss, found = reference(problem, 3)
    expected = loss * factor, {name: None if g is None else g * factor for name, g in found.items()}
    assert_same(stepped(problem, compiled(problem, 2, 3, loss_reduction=reduction)), expected, TOLERANCE)
    with pytest.raises(zbfx.ZbfxError, match="loss_reduction"):
        compiled(problem, 2, 3, loss_reduction="average")


@pytest.mark.parametrize("stages", [1, 3])
def test_case_41_accumulating_over_calls(stages: int) -> None:
    problem = Problem(layers(3), squares, (numbers(6, WIDTH),))
    _, once = reference(problem, 3)
    step = compiled(problem, stages, 3).run_local()
    for calls in (1, 2, 3):
        step(*problem.inputs)
        for name, parameter in problem.model.named_parameters():
            torch.testing.assert_close(parameter.grad, calls * once[name], rtol=1e-10, atol=0)  # type: ignore[operator]


def test_case_42_batch_that_does_not_divide() -> None:
    problem = Problem(layers(3), mean_squares, (numbers(8, WIDTH),), (numbers(8, WIDTH, seed=2),))
    step = compiled(problem, 2, 4).run_local()
    for size in (6, 7, 9, 0):
        with pytest.raises(InputError, match=r"inputs\[0\]: expected shape \(8, 6\)") as caught:
            step(numbers(size, WIDTH), numbers(size, WIDTH))
        assert f"found ({size}, 6)" in str(caught.value)
    with pytest.raises(InputError, match=r"targets\[0\]"):
        step(numbers(8, WIDTH), numbers(6, WIDTH))
    assert step.count == 0
    assert all(parameter.grad is None for parameter in problem.model.parameters())
    uneven: list[tuple[tuple[Tensor, ...], dict[str, Any]]]
    uneven = [((x, y), {}) for x, y in zip(numbers(6, WIDTH).chunk(4), numbers(6, WIDTH).chunk(4), strict=False)]
    with pytest.raises(InputError, match="expected 4 microbatches, found 3"):
        step.run_split(uneven)
    assert_same((step(*problem.inputs, *problem.targets), gradients(problem.model)), reference(problem, 4), TOLERANCE)


def test_case_43_shapes_that_change_between_steps() -> None:
    problem = Problem(layers(3), squares, (numbers(6, 4, WIDTH),))
    other = replace(problem, inputs=(numbers(3, 4, WIDTH, seed=4),))
    longer = replace(problem, inputs=(numbers(6, 5, WIDTH, seed=5),))
    pipe = compiled(problem, 2, 3)
    with pytest.raises(InputError, match="on_new_shape='recompile'"):
        pipe.run_local()(*other.inputs)
    step = pipe.run_local(on_new_shape="recompile")
    for batch in (problem, other, longer, problem, other):
        problem.model.zero_grad()
        assert_same((step(*batch.inputs), gradients(problem.model)), reference(batch, 3), TOLERANCE)
    with pytest.raises(InputError, match="divisible into 3"):
        step(numbers(4, 4, WIDTH))


@cache
def four_layers() -> nn.Module:
    return layers(4)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-2p"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_case_44_any_number_of_microbatches(stages: int, schedule: str) -> None:
    for microbatches in (1, 2, 3, 4):
        problem = Problem(four_layers(), squares, (numbers(2 * microbatches, WIDTH),))
        with one_trace(TRACES):
            pipe = compiled(problem, stages, microbatches, schedule=schedule)
        assert_same(stepped(problem, pipe), reference(problem, microbatches), TOLERANCE)


def normed() -> Problem:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    return Problem(model, squares, (numbers(8, WIDTH) + 3.0,))


@pytest.mark.parametrize("stages", [1, 2])
def test_case_46_evaluation_and_steps_in_any_order(stages: int) -> None:
    problem = normed()
    pipe = compiled(problem, stages, 4)
    step = pipe.run_local(on_new_shape="recompile")

    def evaluated(batch: Tensor) -> float:
        eager = copy.deepcopy(problem.model).eval()
        losses = torch.stack([squares(eager(part)).detach() for part in batch.split(2)])
        before = copy.deepcopy(problem.model.state_dict())
        found = step.evaluate(batch)
        assert problem.model.training
        assert all(torch.equal(t, before[name]) for name, t in problem.model.state_dict().items())
        assert found.item() == pytest.approx(losses.mean().item(), rel=TOLERANCE)
        return found.item()

    before = evaluated(problem.inputs[0])
    assert all(parameter.grad is None for parameter in problem.model.parameters())
    step(*problem.inputs)
    kept = {name: g.clone() for name, g in gradients(problem.model).items() if g is not None}
    assert kept
    assert evaluated(problem.inputs[0]) != before  # the running statistics have moved
    evaluated(numbers(4, WIDTH, seed=7))
    evaluated(numbers(12, WIDTH, seed=8))
    assert all(torch.equal(g, kept[name]) for name, g in gradients(problem.model).items() if g is not None)
    step(*problem.inputs)


@pytest.mark.slow
def test_case_47_batch_norm_updates_in_microbatch_order() -> None:
    """As gradient accumulation in one process: m updates with the microbatches' statistics, none from compile."""
    torch.manual_seed(0)
    for norm in (nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.5, affine=False)):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        problem = Problem(model, squares, (numbers(8, WIDTH) + 3.0,))
        for schedule in ("gpipe", "zb-h1"):
            assert norm.num_batches_tracked is not None
            before = norm.num_batches_tracked.item()
            check(problem, (1, 2), 4, schedule=schedule)
            assert norm.num_batches_tracked.item() == before + 4


class Routed(nn.Module):
    """A gate in the middle, with a loss that balances its load."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears("first", "router", "second", "third")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.layers["first"](x))
        gate = torch.softmax(self.layers["router"](h), -1)
        load = F.one_hot(gate.argmax(-1), WIDTH).to(gate.dtype).mean(0)
        balance = (gate.mean(0) * load).sum() * WIDTH
        h = torch.tanh(self.layers["second"](h * gate))
        return self.layers["third"](h), balance


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved-1f1b"])
def test_case_48_auxiliary_loss_in_a_middle_stage(schedule: str) -> None:
    def loss_fn(output: tuple[Tensor, Tensor]) -> Tensor:
        return squares(output[0]) + 0.1 * output[1]

    problem = Problem(Routed(), loss_fn, (numbers(8, WIDTH),))
    check(problem, 2, 4, schedule=schedule)
    if schedule == "zb-h1":
        pipe = check(problem, 3, 4, cuts=["layers.router", "layers.second"])
        assert "layers.router.weight" in {
            *pipe.stages[1].phases[Kind.W].gradients,
            *pipe.stages[1].phases[Kind.B].gradients,
        }


def test_case_50_microbatch_that_is_not_finite() -> None:
    problem = Problem(layers(3), squares, (numbers(6, WIDTH),))
    bad = problem.inputs[0].clone()
    bad[2] = float("nan")
    pipe = compiled(problem, 2, 3)
    for choice in ("drop", "raise"):
        problem.model.zero_grad()
        step = pipe.run_local(on_nonfinite=choice)
        step(*problem.inputs)
        kept = {name: g.clone() for name, g in gradients(problem.model).items() if g is not None}
        if choice == "raise":
            with pytest.raises(zbfx.NonFiniteStep, match="microbatch 1"):
                step(bad)
        else:
            step(bad)
        assert step.verdict is not None
        assert "the loss of microbatch 1 is nan" in step.verdict
        assert kept.keys() == {name for name, _ in problem.model.named_parameters()}
        for name, gradient in gradients(problem.model).items():
            assert gradient is not None
            assert torch.equal(gradient, kept[name])
        step(*problem.inputs)  # and goes on
        assert step.verdict is None
        assert all(torch.isfinite(p.grad).all() for p in problem.model.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-v", "zb-h1"])
def test_case_51_loss_is_returned_wherever_it_arises(schedule: str) -> None:
    """For a V the last stage is on rank 0. Over processes see tests/processes/test_processes.py: every rank returns the
    loss."""
    problem = Problem(layers(4), squares, (numbers(6, WIDTH),))
    pipe = check(problem, 2, schedule=schedule)
    assert pipe.compiled.loss_rank == (0 if schedule == "zb-v" else 1)
    loss: Any = pipe.run_local()(*problem.inputs)
    assert loss.item() == pytest.approx(reference(problem, 3)[0].item(), rel=TOLERANCE)
    assert not loss.requires_grad
