"""No rank waits for ever, however its host waits for its device.

A host may wait for the whole device wherever code is loaded, or memory is asked for: after it has a step's verdict, and
before the rest of the step is launched, as in corrections that run for the first time; and as it steps its optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.devices import BESIDE, MAIN, Device, Events
from tests.support.models import ROWS, Problem, mean_squares, mlp, numbers
from tests.support.reference import compiled
from zbfx.comm.group import GroupTransport
from zbfx.compiled import Compiled
from zbfx.program.chain import Chain, chain_of, order_of_ranks, summary_of
from zbfx.program.codegen import Program, optimizer_program
from zbfx.program.messages import messages_of
from zbfx.runtime.captured import finished
from zbfx.runtime.runner import RankRunner, Tensors

MICROBATCHES = 8
VERDICTS = ("clean", "refuted", "skipped", "clean", "refuted, skipped")
CHANNELS = {"inboxes": (10**9, True), "inboxes that are too small": (1, True), "NCCL": (0, False)}


class Far(nn.Module):
    """Each layer also reads what one `far` before it made."""

    def __init__(self, width: int, depth: int, far: int) -> None:
        super().__init__()
        self.layers, self.far = nn.ModuleList(nn.Linear(width, width) for _ in range(depth)), far

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x + made[k - self.far] if k >= self.far else x))
            made.append(x)
        return x


def problem(far: int) -> Problem:
    """`far`: 0 for layers in a row."""
    rows = ROWS * MICROBATCHES
    if not far:
        return mlp(MICROBATCHES, layers=8)
    torch.manual_seed(0)
    return Problem(Far(6, 8, far), mean_squares, (numbers(rows, 6),), (numbers(rows, 6, seed=2),))


class Pending:
    """An optimizer step whose verdict is as given, and whose host waits for its device at each chance."""

    def __init__(self, device: Device, state: int | None, verdict: str) -> None:
        self.device, self.state, self.is_refuted = device, state, "refuted" in verdict
        self.stream: Any = device

    def own_verdict(self) -> Tensor:
        event = self.device.events.add(
            "the state is complete", self.device.host, self.device.last.get(BESIDE), self.state
        )
        self.device.last[BESIDE] = event
        return torch.zeros(1, dtype=torch.float64)

    def judge(self, verdict: Tensor) -> None:
        self.device.wait_for(BESIDE)
        self.device.wait_for()

    def correct(self) -> None:
        self.device.wait_for()


@contextmanager
def on_stream(device: Device) -> Iterator[None]:
    if device.events.lines:
        device.wait_for()  # the verdict needs memory
    device.stream = BESIDE
    yield
    device.stream = MAIN


def zeros(made: list[Tensor], box: list[Any]) -> list[Tensor]:
    return made


def runner_of(pipe: Compiled, program: Program, device: Device) -> RankRunner:
    """Its phases make zeros."""
    runner = RankRunner(program, Tensors({}, {}), GroupTransport(program.messages, device), ())  # type: ignore[arg-type]
    runner.summarize = lambda *losses: (torch.zeros(()),)
    for call in runner.calls:
        examples = pipe.stages[call.phase.stage].examples
        made = [torch.zeros(examples[n].shape if isinstance(n, str) and n in examples else ()) for n in call.returned]
        call.take = functools.partial(zeros, made)  # type: ignore[method-assign, assignment]
    return runner


def launch(
    pipe: Compiled, chain: Chain, program: Program, device: Device, *, captured: bool, early: bool = False
) -> None:
    """Steps of a rank, as `CapturedStep` and `Step` launch them, and the optimizer's. `early`: ranks tell each
    other why a step is skipped before they launch the rest of the next one."""
    runner = runner_of(pipe, program, device)
    optimizer = runner_of(pipe, optimizer_program(chain, pipe.schedule, program.rank), device)
    states: list[int | None] = []

    def reduce(*_: Tensor) -> Tensor:
        device.wait_for(MAIN)
        states.append(device.last.get(MAIN))
        return torch.zeros(1, dtype=torch.float64)

    optimizer.bound("reduce").run = reduce
    optimizer.bound("step").run = lambda state: device.wait_for()
    given = runner.given([None] * MICROBATCHES)  # type: ignore[list-item]
    prefix = rest = None
    received: set[str] = set()
    for step, verdict in enumerate((None, *VERDICTS)):
        pending = runner.pending = None if verdict is None else Pending(device, states[-1], verdict)
        runner.bind_summary(runner.summarize)
        if not captured:
            environment = dict(given)
            finished(runner.warm_up(environment, step))
            if pending is not None and finished(runner.settle(step, warmed_up=True)):
                environment = dict(given)
                finished(runner.warm_up(environment, step))
            finished(runner.complete(environment, step))
        else:
            if prefix is None or rest is None:
                environment = dict(given)
                with device.capturing() as prefix:
                    finished(runner.warm_up(environment, step))
                    received = runner.transport.join()
                with device.capturing() as rest:
                    finished(runner.complete(environment, step))
            device.replay(prefix)
            if pending is not None and finished(runner.settle(step, warmed_up=True, received=received)):
                device.replay(prefix)
            if early and verdict == "skipped":
                device.meet()
            device.replay(rest)
            runner.transport.finish()
        if verdict is not None and "skipped" in verdict and not early:
            device.wait_for()
            device.meet()  # where it began
        finished(optimizer.execute(range(len(optimizer.nodes)), {optimizer.nodes[0]: optimizer.transport}, step))
        optimizer.transport.finish()


@functools.cache
def validated(far: int, schedule: str) -> tuple[Compiled, Chain]:
    pipe = compiled(problem(far), 4, MICROBATCHES, schedule=schedule)
    order = order_of_ranks(pipe.schedule, pipe.compiled.loss_rank)
    messages, summary = messages_of(pipe.stages, pipe.schedule), summary_of(pipe.stages)
    return pipe.compiled.validated(order, 1), chain_of(pipe.schedule, messages, order, summary, 1)


@pytest.mark.slow
@pytest.mark.parametrize("far", [0, 5])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2", "interleaved-1f1b", "zb-v-order", "v-half"])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("channels", CHANNELS)
def test_ranks_do_not_wait_for_each_other(
    far: int, schedule: str, captured: bool, channels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where skip connections lead over several stages of a V, to ranks that hear of a verdict later."""
    monkeypatch.setattr("zbfx.runtime.runner.on_stream", on_stream)
    pipe, chain = validated(far, schedule)
    are_even = schedule in ("zb-v-order", "v-half")  # equally many forwards before the first backward of every rank
    assert are_even or len(set(chain.prefix)) > 1, "forwards wait for the rest of other ranks' steps"
    events = Events(*CHANNELS[channels])
    for program in pipe.programs:
        launch(pipe, chain, program, Device(events, program.rank), captured=captured)
    assert events.circle() == []


def test_ranks_that_tell_each_other_too_early_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a graph that ends once its messages are received, on a device for which a host waits."""
    monkeypatch.setattr("zbfx.runtime.runner.on_stream", on_stream)
    pipe, chain = validated(0, "zb-h2")
    events = Events(*CHANNELS["inboxes"])
    for program in pipe.programs:
        launch(pipe, chain, program, Device(events, program.rank), captured=True, early=True)
    circle = events.circle()
    assert {f"rank {rank}: the host has met others" for rank in range(4)} & set(circle)
    assert any("a graph ends" in event for event in circle)
