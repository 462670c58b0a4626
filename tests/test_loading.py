"""Phases called on made-up values before their first message: each once, and nothing is changed by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zbfx
from zbfx.calls import PhaseCall
from zbfx.loading import load

CPU = torch.device("cpu")
PHASES = ("F0", "B0", "W0", "F1", "B1", "W1")


def counted(call: PhaseCall, counts: Counter[str]) -> Callable[[list[Any]], Any]:
    run = call.run

    def wrapper(box: list[Any]) -> Any:
        counts[call.phase.name] += 1
        return run(box)

    return wrapper


def test_every_phase_runs_once_and_leaves_everything_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    )
    batch, targets = torch.randn(8, 6), torch.randn(8, 3)
    pipe = zbfx.compile(
        model,
        stages=2,
        microbatches=2,
        example_inputs=(batch[:4],),
        example_targets=targets[:4],
        loss_fn=nn.MSELoss(),
        schedule="zb-2p",
        check=False,
    )
    step = pipe.run_local()
    step(batch, targets)
    calls = [call for runner in step.engine.runners for call in runner.calls]
    counts: Counter[str] = Counter()
    for call in calls:
        call.run = counted(call, counts)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(tensors) == 8 + 3 + 8
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    random = torch.get_rng_state()
    load(calls, CPU)
    assert counts == dict.fromkeys(PHASES, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert torch.equal(torch.get_rng_state(), random)


def test_what_refuses_made_up_values_is_left_to_the_step() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(self.weight + x)

    model = nn.Sequential(nn.Linear(4, 4), Inverse(), nn.Linear(4, 4))
    batch = torch.eye(4).expand(4, 4, 4).contiguous()
    pipe = zbfx.compile(
        model,
        stages=2,
        microbatches=2,
        example_inputs=(batch[:2],),
        loss_fn=lambda output: output.square().mean(),
        schedule="1f1b",
        check=False,
    )
    step = pipe.run_local()
    expected = step(batch)
    load([call for runner in step.engine.runners for call in runner.calls], CPU)
    assert torch.equal(step(batch), expected)


@pytest.mark.parametrize("costs", ["measure", "estimate"])
def test_a_phase_is_compiled_once(monkeypatch: pytest.MonkeyPatch, costs: str) -> None:
    """For its costs, for what it holds, and for all steps."""
    made: list[str] = []

    def compiled(module: fx.GraphModule, box: list[Any]) -> Callable[[list[Any]], Any]:
        made.append(type(module).__name__)
        return lambda values: module(*values)

    monkeypatch.setattr("zbfx.boxed.inductor", compiled)
    batch = torch.ones(4, 8)
    pipe = zbfx.compile(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        stages=2,
        microbatches=2,
        example_inputs=(batch[:2],),
        loss_fn=lambda output: output.square().mean(),
        schedule="zb-h1",
        backend="inductor",
        costs=costs,
        cuts=["2"],
        check=False,
    )
    for runner in (step := pipe.run_local()).engine.runners:
        for call in runner.calls:
            call.run = pipe.compiler(call.phase)
    for _ in range(2):
        step(batch)
    assert sorted(made) == sorted(PHASES)
