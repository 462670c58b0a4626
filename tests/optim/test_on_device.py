"""Steps that are clipped and skipped where the gradients are, without this process."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Problem, mlp
from tests.support.reference import compiled, loss_of
from zbfx.optim import PostValidated, on_device, post_validated
from zbfx.optim.state import Verdict

pytestmark = pytest.mark.usefixtures("known_traces")

FUSED: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
STEPS, RANKS, MICROBATCHES = 8, 3, 3
BAD = (0, 4)  # steps with a gradient that is not finite


class Noted(on_device.Ruling):
    """A ruling that tells when this process reads it."""

    reads: ClassVar[list[on_device.Ruling]] = []

    @property
    def verdict(self) -> Verdict:
        self.reads.append(self)
        return super().verdict


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[on_device.Ruling]:
    """The rulings that this process has read."""
    Noted.reads.clear()
    monkeypatch.setattr(post_validated, "Ruling", Noted)
    return Noted.reads


def float32() -> Problem:
    problem = mlp(MICROBATCHES)
    inputs, targets = (tuple(t.float() for t in group) for group in (problem.inputs, problem.targets))
    return replace(problem, model=problem.model.float(), inputs=inputs, targets=targets)


def gradients_of(step: Any) -> list[Tensor]:
    return [p.grad for p in step.parameters() if p.grad is not None]


@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("name", list(FUSED))
def test_steps_equal_those_of_plain_torch(name: str, ranks: int, reads: list[on_device.Ruling]) -> None:
    """About half of them clip; two, in which a gradient is not finite, are skipped, the first step among them."""
    problem = float32()
    plain = copy.deepcopy(problem.model)
    step = compiled(problem, ranks, MICROBATCHES, check=False).run_local()
    max_norm = 0.4
    optimizer = PostValidated(FUSED[name](step.parameters()), step, max_norm=max_norm, sync=True)
    reference, verdicts, norms = FUSED[name](plain.parameters()), list[Any](), list[float]()
    optimizer.on_final(verdicts.append)
    by_process = 2 if name == "sgd" else 0  # until momentum is there
    for count in range(STEPS):
        inputs, targets = (tuple(t.roll(count, 0) for t in group) for group in (problem.inputs, problem.targets))
        loss = step(*inputs, *targets)
        assert len(verdicts) == count
        assert len(reads) == max(0, count - by_process)
        expected = loss_of(problem, plain, inputs, targets, {})
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-6)
        if count in BAD:
            gradients_of(step)[0].fill_(float("inf"))
        else:
            norms.append(float(nn.utils.clip_grad_norm_(plain.parameters(), max_norm)))
            reference.step()
        optimizer.step()
        assert len(reads) == max(0, count - by_process), "the process does not wait for the device"
        optimizer.zero_grad()
        reference.zero_grad()
    optimizer.settle()
    assert len(verdicts) == STEPS
    assert [verdict.skipped for verdict in verdicts] == [count in BAD for count in range(STEPS)]
    assert all(verdicts[count].nonfinite for count in BAD)
    found = [verdict.norm for verdict in verdicts if not verdict.skipped]
    assert found == pytest.approx(norms, rel=1e-4)
    assert optimizer.counts.skipped == len(BAD)
    assert 0 < optimizer.counts.clipped == sum(norm > max_norm for norm in norms) < STEPS - len(BAD)
    assert not optimizer.counts.repeated
    for own, other in zip(problem.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


def test_gradients_are_clipped_where_they_are() -> None:
    problem = float32()
    step = compiled(problem, RANKS, MICROBATCHES, check=False).run_local()
    optimizer = PostValidated(FUSED["adamw"](step.parameters()), step, max_norm=1e-2, sync=True)
    step(*problem.inputs, *problem.targets)
    before = [gradient.clone() for gradient in gradients_of(step)]
    optimizer.step()
    norm = torch.cat([g.flatten() for g in before]).norm()
    for parameter, gradient in zip(step.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 1e-2 / norm)


def test_a_cause_is_found_after_the_next_step() -> None:
    problem = float32()
    step = compiled(problem, RANKS, MICROBATCHES, check=False).run_local()
    optimizer = PostValidated(FUSED["sgd"](step.parameters()), step, max_norm=1.0, sync=True)
    for poisoned in (True, False):
        step(*problem.inputs, *problem.targets)
        if poisoned:
            gradients_of(step)[-1].fill_(float("nan"))
        assert optimizer.verdict is None or "no value between stages, but the gradient of" in str(optimizer.verdict)
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.verdict is not None
    optimizer.settle()
    assert not optimizer.verdict.skipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float64_is_clipped_by_a_number_as_long(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype))]
    assert on_device.clips_on_device(FUSED["adam"](parameters)) is (dtype is torch.float32)
    assert not on_device.clips_on_device(torch.optim.Adam(parameters))


def test_a_scale_that_the_next_step_needs_is_known_before(reads: list[on_device.Ruling]) -> None:
    """A `GradScaler` lowers its scale before the next backward, so that the process has to wait."""
    problem = float32()
    step = compiled(problem, RANKS, MICROBATCHES, check=False).run_local()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = PostValidated(FUSED["sgd"](step.parameters()), step, max_norm=1.0, grad_scaler=scaler, sync=True)
    step(*problem.inputs, *problem.targets)
    optimizer.step()
    assert optimizer.verdict is not None
    assert not reads


def test_readers_of_a_step_are_called_in_the_next_call() -> None:
    problem = float32()
    step = compiled(problem, 1, MICROBATCHES, check=False).run_local()
    optimizer = PostValidated(FUSED["adam"](step.parameters()), step, max_norm=1.0)
    seen: list[Verdict] = []
    optimizer.on_final(seen.append)
    step(*problem.inputs, *problem.targets)
    optimizer.step()
    assert not seen
    step.evaluate(*problem.inputs, *problem.targets)
    assert len(seen) == 1


def test_whoever_asks_for_a_verdict_waits_for_it() -> None:
    problem = float32()
    step = compiled(problem, 1, MICROBATCHES, check=False).run_local()
    optimizer = PostValidated(FUSED["adam"](step.parameters()), step, max_norm=1.0)
    step(*problem.inputs, *problem.targets)
    norm = torch.cat([gradient.flatten() for gradient in gradients_of(step)]).norm()
    optimizer.step()
    assert optimizer.verdict is not None
    assert optimizer.verdict.norm == pytest.approx(float(norm), rel=1e-6)
    assert optimizer.counts.steps == 1


def test_gradients_do_not_outlive_their_step() -> None:
    problem = float32()
    step = compiled(problem, 1, MICROBATCHES, check=False).run_local()
    optimizer = PostValidated(FUSED["adam"](step.parameters()), step, max_norm=1.0)
    step(*problem.inputs, *problem.targets)
    held = [weakref.ref(gradient) for gradient in gradients_of(step)]
    optimizer.step()
    optimizer.zero_grad()
    for runner in step.engine.runners:
        for call in runner.calls:
            call.accumulators = []  # as the next step binds its own
    assert not [gradient for gradient in held if gradient() is not None]
