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
from tests.support.live_bytes import LiveBytes, measured_peaks
from zbfx._torch.compiling import inductor
from zbfx.plan import Kind
from zbfx.program.calls import PhaseCall
from zbfx.runtime.engine import take_turns
from zbfx.runtime.loading import load

CPU = torch.device("cpu")
PHASES = ("F0", "B0", "W0", "F1", "B1", "W1")


def counted(call: PhaseCall, counts: Counter[str]) -> Callable[[list[Any]], Any]:
    run = call.run

    def wrapper(box: list[Any]) -> Any:
        counts[call.phase.name] += 1
        return run(box)

    return wrapper


def load_all(step: Any, *batch: Tensor) -> None:
    """Load every rank of a local step."""
    pipe = step.engine.pipe
    rows = pipe.signature.split(batch, {}, pipe.reduction.microbatches)
    with torch.no_grad():
        for runner in step.engine.runners:
            runner.start(step.engine.loss_gradient)
            load(runner, pipe.stage_of, step.engine.inputs(rows, runner, 0), 0, CPU)


def test_a_step_is_rehearsed_and_leaves_everything_as_it_was() -> None:
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
    runs = [call.run for call in calls]
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(tensors) == 8 + 3 + 8
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    random = torch.get_rng_state()
    load_all(step, batch, targets)
    assert counts == dict.fromkeys(PHASES, 2)
    assert [call.run for call in calls] == runs
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    assert torch.equal(torch.get_rng_state(), random)


class Calls(TorchDispatchMode):
    """What is called on tensors that hold anything: ops, with layouts, alignment and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        described = tree_map_only(Tensor, lambda t: (t.shape, t.stride(), t.dtype, t.data_ptr() % 16), (args, kwargs))
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


class Uneven(nn.Module):
    """Sends a part of a value, whose reader gets it without gaps, and takes microbatches of odd sizes."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(features, 8), nn.Linear(3, features)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x)[:, 2:5])


@pytest.mark.slow
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-2p", "zb-v", "interleaved-1f1b"])
@pytest.mark.parametrize(("model", "features"), [(Tied, 6), (Uneven, 5)])
def test_a_step_calls_nothing_new(
    model: Callable[[int], nn.Module], features: int, schedule: str, watched: bool
) -> None:
    """Whatever an op is called on in a step, it was called on the same before."""
    torch.manual_seed(0)
    batch = torch.randn(8, features)
    pipe = zbfx.compile(
        model(features),
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
        with loaded:
            load_all(step, batch)
        assert all(runner.watched == ([] if watched else None) for runner in step.engine.runners)
        with called:
            rows = [[row] for row in batch.chunk(4)]
            runs = [runner.run(step.engine.inputs(rows, runner, 0), 0) for runner in step.engine.runners]
            take_turns(runs)
    assert any("addmm" in call for call in called.found)
    assert called.found <= loaded.found, called.found - loaded.found


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_loading_holds_as_much_as_a_step(monkeypatch: pytest.MonkeyPatch, schedule: str, microbatches: int) -> None:
    """What is put back waits in the host's memory, which is the device's here; microbatches are no part of peaks."""
    monkeypatch.setattr("zbfx.runtime.loading.put_back", lambda tensors: nullcontext())
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(6, 64), Tied(64), nn.GELU(), nn.Linear(64, 6)), torch.randn(8, 6)
    rows = [[row] for row in batch.chunk(microbatches)]
    pipe = zbfx.compile(
        model,
        stages=2,
        microbatches=microbatches,
        example_inputs=tuple(rows[0]),
        loss_fn=lambda output: output.square().mean(),
        schedule=schedule,
        check=False,
    )
    peaks = [counter.peak for counter in measured_peaks(pipe, rows)]
    engine = pipe.run_local().engine
    for runner, peak in zip(engine.runners, peaks, strict=True):
        runner.start(torch.zeros(()))
        given = engine.inputs(rows, runner, 0)
        with LiveBytes() as counter:
            load(runner, pipe.compiled.stage_of, given, 0, CPU)
        assert counter.peak == peak, runner.rank


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.weight * x)


def inverse_pipe(**options: Any) -> tuple[zbfx.Pipeline, Tensor]:
    """The second stage inverts what comes from the first, and checks it: where it is made up, it is singular."""
    first = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.eye(4))
    batch = torch.eye(4).expand(4, 4, 4).contiguous()
    pipe = zbfx.compile(
        nn.Sequential(first, Inverse(), nn.Linear(4, 4)),
        stages=2,
        microbatches=2,
        example_inputs=(batch[:2],),
        loss_fn=lambda output: output.square().mean(),
        schedule="1f1b",
        cuts=["1"],
        check=False,
        **options,
    )
    return pipe, batch


def test_what_refuses_made_up_values_is_left_to_the_step() -> None:
    pipe, batch = inverse_pipe()
    step = pipe.run_local()
    expected = step(batch)
    counts: Counter[str] = Counter()
    calls = {call.phase.name: call for runner in step.engine.runners for call in runner.calls}

    def refusing(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def wrapper(box: list[Any]) -> Any:
            run(box)
            raise ValueError("made up")

        return wrapper

    whole = calls["F1"].run
    calls["F1"].run = refusing(whole)
    for name in ("B1", "W1"):
        calls[name].run = counted(calls[name], counts)
    load_all(step, batch)
    assert counts == {"B1": 2, "W1": 2}
    with pytest.raises(zbfx.PipelineFault, match="made up"):
        step(batch)
    calls["F1"].run = whole
    assert torch.equal(step(batch), expected)


def test_a_device_without_room_is_not_left_to_the_step() -> None:
    pipe, batch = inverse_pipe()
    step = pipe.run_local()
    expected = step(batch)
    call = step.engine.runners[1].calls[0]

    def full(box: list[Any]) -> Any:
        raise torch.OutOfMemoryError("full")

    whole, call.run = call.run, full
    with pytest.raises(zbfx.PipelineFault, match="full"):
        load_all(step, batch)
    assert call.run is full
    call.run = whole
    assert torch.equal(step(batch), expected)


@pytest.mark.inductor
@pytest.mark.skipif(torch.__version__ < "2.13", reason="earlier tracers leave the checks out")
def test_phases_with_checks_are_compiled_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled once, with their checks, which made-up values need not pass."""
    made: list[str] = []

    def compiled(module: fx.GraphModule, box: list[Any]) -> Callable[[list[Any]], Any]:
        made.append(type(module).__name__)
        return inductor(module, box)

    monkeypatch.setattr("zbfx.program.boxed.inductor", compiled)
    pipe, batch = inverse_pipe(backend="inductor")
    step = pipe.run_local()
    names = []
    for runner in step.engine.runners:
        for call in runner.calls:
            call.run = pipe.compiler(call.phase)
            names.append(call.phase.name)
    load_all(step, batch)
    assert sorted(made) == sorted(names)
    assert any("_linalg_check_errors" in node.name for node in pipe.stages[1].phases[Kind.F].module.graph.nodes)
    step(batch)
    assert len(made) == len(names)
    with pytest.raises(zbfx.PipelineFault, match=r"F1\.0 .*singular"):
        step(torch.zeros(4, 4, 4))


@pytest.mark.parametrize("costs", ["measure", "estimate"])
def test_a_phase_is_compiled_once(monkeypatch: pytest.MonkeyPatch, costs: str) -> None:
    """For its costs, for what it holds, and for all steps."""
    made: list[str] = []

    def compiled(module: fx.GraphModule, box: list[Any]) -> Callable[[list[Any]], Any]:
        made.append(type(module).__name__)
        return lambda values: module(*values)

    monkeypatch.setattr("zbfx.program.boxed.inductor", compiled)
    batch = torch.ones(4, 8)
    pipe = zbfx.compile(
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)),
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
