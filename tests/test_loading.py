"""Phases called on made-up values before their first message: each once, and nothing is changed by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import zbfx
from tests.live_bytes import LiveBytes, measured_peaks
from zbfx.calls import PhaseCall
from zbfx.engine import take_turns
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
    for runner in step.engine.runners:
        runner.start(step.engine.loss_gradient)
        load(runner, pipe.stages, CPU)
    assert counts == dict.fromkeys(PHASES, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert torch.equal(torch.get_rng_state(), random)


class Calls(TorchDispatchMode):
    """What is called on tensors that hold anything: ops, with layouts and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        described = tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype), (args, kwargs))
        if torch.Tag.view_copy not in func.tags and not func.is_view and "empty" not in str(func):
            self.found.add(f"{func}{described}")
        return func(*args, **(kwargs or {}))


class Tied(nn.Module):
    """Shares a parameter between stages, draws random numbers, and sends what is not contiguous."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, features))
        self.norm, self.inner = nn.BatchNorm1d(features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x @ self.weight).t()
        return torch.dropout(self.inner(x.t()), 0.5, train=True) @ self.weight


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-2p", "zb-v", "interleaved-1f1b"])
def test_a_step_calls_nothing_new(schedule: str, watched: bool) -> None:
    """Whatever an op is called on in a step, it was called on the same before."""
    torch.manual_seed(0)
    model, batch = Tied(6), torch.randn(8, 6)
    pipe = zbfx.compile(
        model,
        stages=2,
        microbatches=4,
        example_inputs=(batch[:2],),
        loss_fn=lambda output: output.square().mean(),
        schedule=schedule,
        check=False,
    )
    step = pipe.run_local()
    loaded, called = Calls(), Calls()
    with torch.no_grad():
        for runner in step.engine.runners:
            runner.watched = [] if watched else None
            runner.start(torch.zeros(()))
            with loaded:
                load(runner, pipe.stages, CPU)
            assert runner.watched == ([] if watched else None)
        with called:
            rows = [[row] for row in batch.chunk(4)]
            runs = [runner.run(step.engine.inputs(rows, runner, 0), 0) for runner in step.engine.runners]
            take_turns(runs)
    assert any("addmm" in call for call in called.found)
    assert called.found <= loaded.found, called.found - loaded.found


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_loading_holds_no_more_than_a_step(monkeypatch: pytest.MonkeyPatch, schedule: str, microbatches: int) -> None:
    """What is put back waits in the host's memory, which is the device's here; microbatches are no part of peaks."""
    monkeypatch.setattr("zbfx.loading.put_back", lambda tensors: nullcontext())
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 64), Tied(64), nn.GELU(), nn.Linear(64, 6)), torch.randn(8, 6)
    rows = batch.chunk(microbatches)
    pipe = zbfx.compile(
        model,
        stages=2,
        microbatches=microbatches,
        example_inputs=rows[:1],
        loss_fn=lambda output: output.square().mean(),
        schedule=schedule,
        check=False,
    )
    peaks = [counter.peak for counter in measured_peaks(pipe, [[row] for row in rows])]
    for runner, peak in zip(pipe.run_local().engine.runners, peaks, strict=True):
        runner.start(torch.zeros(()))
        with LiveBytes() as counter:
            load(runner, pipe.stages, CPU)
        assert counter.peak - rows[0].nbytes <= peak, (runner.rank, counter.peak, peak)


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
    for runner in step.engine.runners:
        runner.start(step.engine.loss_gradient)
        load(runner, pipe.stages, CPU)
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
