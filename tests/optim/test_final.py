"""Readers of parameters, called once a verdict is final; several optimizers under one norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zbfx
from tests.support.models import Problem, mlp
from tests.support.optimizers import adamw
from tests.support.reference import compiled, reference
from zbfx.optim import PostValidated

pytestmark = pytest.mark.usefixtures("known_traces")

STEPS, DECAY = 12, 0.75


def trained(problem: Problem, step: Any, optimizer: PostValidated, steps: int = STEPS) -> list[float]:
    losses = []
    for count in range(steps):
        losses.append(step(*(x.roll(count, 0) for x in problem.inputs), *problem.targets).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("sync", [False, True])
def test_average_equals_that_of_plain_torch_in_bits(sync: bool) -> None:
    """Beside plain PyTorch with the same gradients: about half of the steps clip, so that ranks had stepped wrongly."""
    problem, plain = mlp(3), mlp(3)
    kind = get_ema_multi_avg_fn(DECAY)
    found, expected = (AveragedModel(one.model, multi_avg_fn=kind) for one in (problem, plain))
    step = compiled(problem, 3, 3, check=False).run_local()
    optimizer = PostValidated(adamw(step.parameters()), step, max_norm=0.25, sync=sync)
    reference = adamw(plain.model.parameters())
    verdicts = []

    def follow(verdict: Any) -> None:
        """What the step has done, with the gradients that it had, in plain PyTorch."""
        verdicts.append(verdict)
        found.update_parameters(problem.model)
        for parameter, gradient in zip(plain.model.parameters(), gradients.pop(0), strict=True):
            parameter.grad = gradient * verdict.factor if verdict.factor != 1.0 else gradient
        reference.step()
        expected.update_parameters(plain.model)

    gradients: list[list[Tensor]] = []
    handle = optimizer.on_final(follow)
    for count in range(STEPS):
        step(*(x.roll(count, 0) for x in problem.inputs), *problem.targets)
        gradients.append([p.grad.clone() for p in problem.model.parameters() if p.grad is not None])
        optimizer.step()
        assert len(verdicts) == count + sync, "nothing settles each step"
        optimizer.zero_grad()
    optimizer.settle()
    assert len(verdicts) == STEPS
    assert 0 < optimizer.counts.clipped < STEPS, optimizer.counts
    assert sync or optimizer.counts.rolled_back
    for value, wanted in zip(found.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(value, wanted)
    handle.remove()
    trained(problem, step, optimizer, 1)
    assert len(verdicts) == STEPS


def test_what_a_reader_must_not_do_is_refused() -> None:
    problem = mlp(3)
    pipe = compiled(problem, 2, 3, check=False)

    def writes(verdict: Any) -> None:
        next(problem.model.parameters()).detach().mul_(2.0)

    def calls(verdict: Any) -> None:
        step.full_state_dict()

    for function, text in ((writes, "writes, given to on_final, wrote into"), (calls, "cannot make one that")):
        step = pipe.run_local()
        optimizer = PostValidated(adamw(step.parameters()), step)
        optimizer.on_final(function)
        with pytest.raises(zbfx.ZbfxError, match=text):
            trained(problem, step, optimizer, 2)
    with pytest.raises(zbfx.ZbfxError, match="on_final takes a function of the verdict; found"):
        optimizer.on_final(3)  # type: ignore[arg-type]


def several(parameters: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, and AdamW in two groups for all else."""
    every = list(parameters)
    vectors = [p for p in every if p.ndim != 2]
    groups: list[dict[str, Any]] = [{"params": vectors[::2]}, {"params": vectors[1::2], "lr": 0.01}]
    muon = torch.optim.Muon([{"params": [p for p in every if p.ndim == 2]}], lr=0.02)
    return [muon, torch.optim.AdamW(groups, lr=0.03)]


@pytest.mark.parametrize("rollback", [None, "exact"])
def test_several_optimizers_step_under_one_norm(rollback: str | None, tmp_path: Any) -> None:
    """Beside the same optimizers in plain PyTorch, with schedulers of each, through a checkpoint in the middle."""
    problem, plain = mlp(3), mlp(3)
    for one in (problem, plain):
        one.model.double()
    inputs, targets = ([x.double() for x in group] for group in (problem.inputs, problem.targets))
    problem = Problem(problem.model, problem.loss_fn, tuple(inputs), tuple(targets))
    pipe = compiled(problem, 3, 3, check=False)

    def started() -> tuple[Any, PostValidated, list[Any]]:
        step = pipe.run_local()
        inner = several(step.parameters())
        return step, PostValidated(inner, step, max_norm=0.25, rollback=rollback), scheduled(inner)

    step, optimizer, schedulers = started()
    plainly = several(plain.model.parameters())
    expected_schedulers = scheduled(plainly)
    for count in range(STEPS):
        rows = [x.roll(count, 0) for x in inputs]
        if count == STEPS // 2:
            step.save(tmp_path, optimizer=optimizer, first=schedulers[0], second=schedulers[1])
            step.close()
            step, optimizer, schedulers = started()
            step.load(tmp_path, optimizer=optimizer, first=schedulers[0], second=schedulers[1])
        found = step(*rows, *targets).item()
        optimizer.step()
        optimizer.zero_grad()
        wanted, _ = reference(Problem(plain.model, plain.loss_fn, tuple(rows), tuple(targets)), 3, plain.model)
        nn.utils.clip_grad_norm_(plain.model.parameters(), 0.25)
        for other in plainly:
            other.step()
            other.zero_grad()
        for scheduler in (*schedulers, *expected_schedulers):
            scheduler.step()
        assert abs(found - wanted.item()) <= 1e-10 * abs(found)
    optimizer.settle()
    assert optimizer.counts.clipped
    for value, expected in zip(problem.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)
    assert "Muon" in repr(optimizer)


def scheduled(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    return [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


def test_several_optimizers_that_share_or_have_no_inverse_are_refused() -> None:
    problem = mlp(3)
    pipe = compiled(problem, 2, 3, check=False)
    step = pipe.run_local()
    every = list(step.parameters())
    with pytest.raises(zbfx.ZbfxError, match="found one in several of those that were given"):
        PostValidated([adamw(every), adamw(every[:1])], step)
    with pytest.raises(zbfx.ZbfxError, match="Several has no inverse"):
        PostValidated(several(every), step, rollback="arithmetic")
    with pytest.raises(zbfx.ZbfxError, match="or a list of them; found str"):
        PostValidated([adamw(every), "adamw"], step)  # type: ignore[list-item]
    with pytest.raises(zbfx.ZbfxError, match="or a list of them; found list"):
        PostValidated([], step)
