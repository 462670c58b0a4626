"""How a step runs: its phases launched one by one, from Python, or captured as one CUDA graph, or as two where an
optimizer step is validated between them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zbfx.comm.channels import Channels
from zbfx.comm.copies import CopyLine
from zbfx.compiled import Mixed
from zbfx.errors import InputError, ZbfxError
from zbfx.runtime.checked_values import CheckedValue
from zbfx.runtime.engine import BatchResults, Engine, T, take_turns
from zbfx.runtime.loading import load
from zbfx.runtime.runner import Environment, Wait, restore
from zbfx.runtime.timeline import Recorder
from zbfx.trace.signature import on_device

LOADS = ("cuda",)  # devices on which a first call may wait for all others


class Launched:
    """Runs an engine's programs, node by node. Code is loaded before the first message."""

    judges_checks = False  # whether checks of the model's are noted, and judged when the step has run; else each raises

    def prepare(self, engine: Engine) -> None:
        """An engine that this is going to run was made."""

    def check_pending(self, engines: Iterable[Engine]) -> None:
        """Raises `InputError` where a step cannot follow while an optimizer step waits for its verdict."""

    def run(
        self, engine: Engine, rows: Sequence[Sequence[Tensor]], seed: int, step: int, settle: Callable[[], None]
    ) -> BatchResults:
        """What step number `step` makes, whose random numbers follow `seed`. `settle` ends an optimizer step that waits
        for its verdict, for runs in which its gradients are bound anew."""
        device = engine.pipe.device
        loads = engine.runs == 0 and engine.channels is not None and device.type in LOADS
        if loads:
            settle()
        for runner in engine.runners:
            runner.checks = [] if self.judges_checks else None
            runner.start(engine.loss_gradient)
        if loads:
            for runner in engine.runners:
                inputs = engine.inputs(rows, runner, seed)
                load(runner, engine.pipe.stage_of, inputs, step, device)
                del inputs  # the run makes its own
        engine.start_clocks()
        return engine.run(rows, seed, step)


@dataclass(frozen=True)
class Part:
    """A CUDA graph, and the lines to other ranks that it works on."""

    graph: torch.cuda.CUDAGraph
    device: torch.device
    lines: Sequence[CopyLine]

    def replay(self) -> None:
        """Run it after what was begun on its lines outside of graphs, and before what will be begun there."""
        current = torch.cuda.current_stream(self.device)
        for line in self.lines:
            current.wait_stream(line.stream)
        self.graph.replay()
        for line in self.lines:
            line.stream.wait_stream(current)


@dataclass
class Capture:
    """A rank's step as a CUDA graph, with the results that it writes."""

    whole: Part
    results: BatchResults
    prefix: Part | None = None  # what runs before the verdict on an optimizer step
    received: frozenset[str] = frozenset()  # messages for later that the prefix receives
    watched: tuple[Any, ...] = ()
    tensors: Sequence[Tensor] = ()  # parameters, buffers and gradients: `model.to(...)` there and back moves them
    checks: Sequence[CheckedValue] = ()  # whose conditions it writes
    addresses: tuple[int, ...] = ()  # where it reads and writes them
    recorder: Recorder | None = None  # whose marks it writes: they live as long as the graph

    @property
    def is_left(self) -> bool:
        """Whether any of its tensors has moved."""
        return tuple(map(Tensor.data_ptr, self.tensors)) != self.addresses

    def serves(self, recorder: Recorder | None) -> bool:
        """Whether a step that writes these marks is a replay."""
        return self.recorder is recorder and not self.is_left


@dataclass(frozen=True)
class StaticInputs:
    """What the graphs of an engine read: a batch, and the rank's parameters and buffers."""

    rows: list[list[Tensor]]
    tensors: list[Tensor]


class Captured(Launched):
    """Runs an engine's program as a graph. The first run of an engine is launched, and warms everything up; the second
    captures, without running anything, and replays; later ones copy the batch into static buffers and replay. So do
    forwards. Steps of unlike microbatches are launched. Random ops draw from the device's default generator, in program
    order: masks differ from those of other backends."""

    judges_checks = True

    def prepare(self, engine: Engine) -> None:
        for runner in engine.runners:
            runner.keep()

    def check_pending(self, engines: Iterable[Engine]) -> None:
        if any(engine.captured is not None and engine.captured.is_left for engine in engines):
            # To capture anew settles the step before the forwards; ranks whose tensors came back to the same places
            # settle it after theirs.
            raise InputError(
                "the model was moved while an optimizer step waits for its verdict. Call optimizer.settle(), on all "
                "ranks, before model.to(...)"
            )

    def run(
        self, engine: Engine, rows: Sequence[Sequence[Tensor]], seed: int, step: int, settle: Callable[[], None]
    ) -> BatchResults:
        if isinstance(engine.pipe, Mixed):  # the next step is another one
            return super().run(engine, rows, seed, step, settle)
        runner = engine.runners[0]
        if engine.runs == 0:
            device = engine.pipe.device
            engine.static = StaticInputs(
                [[tensor.to(device, copy=True) for tensor in row] for row in rows],
                [runner.tensors.named[name] for name in sorted(runner.tensor_names)],
            )
            return super().run(engine, engine.static.rows, seed, step, settle)
        for static_row, row in zip(engine.static.rows, rows, strict=True):
            for static, tensor in zip(static_row, row, strict=True):
                static.copy_(on_device(tensor, static.device))
        starts = engine.captured is None or not engine.captured.serves(runner.recorder)
        if starts:
            settle()
            tensors = [*engine.static.tensors, *runner.kept.values()]
            engine.captured = replace(
                captured_step(engine, seed, step),
                tensors=tensors,
                addresses=tuple(map(Tensor.data_ptr, tensors)),
                recorder=runner.recorder,
                checks=tuple(runner.checks or ()),
            )
        captured: Capture = engine.captured
        if runner.recorder is not None:
            channels_of(engine).barrier()
            runner.recorder.restart()
        buffers = runner.written_early() if runner.pending else {}
        if captured.prefix is not None:
            captured.prefix.replay()
        if runner.pending is not None:
            assert captured.prefix is not None, "an optimizer waits for its verdict"
            if finished(runner.settle(step, warmed_up=True, received=captured.received)):
                restore(buffers)
                captured.prefix.replay()
        if not starts:
            runner.start_gradients()
        captured.whole.replay()
        runner.checks = list(captured.checks)
        runner.transport.finish()  # the verdict that was passed on, which no graph holds
        if runner.watched is not None:
            runner.watched[:] = captured.watched
        return captured.results.cloned()


def captured_step(engine: Engine, seed: int, step: int) -> Capture:
    torch.cuda.synchronize()
    engine.captured = None  # two graphs would hold the memory of two steps
    runner = engine.runners[0]
    runner.checks = []
    runner.start(engine.loss_gradient)
    if runner.watched is not None:
        runner.watched.clear()
    try:
        if runner.program.chain.validates:
            return capture_parts(engine, seed, step)
        made: list[BatchResults] = []
        whole = part(lambda: made.append(engine.run(engine.static.rows, seed, step)), channels_of(engine))
        return Capture(whole, made[0], watched=tuple(runner.watched or ()))
    except RuntimeError as error:
        raise ZbfxError(
            f"this step cannot be captured as a CUDA graph: {error}. Use backend='eager' or 'inductor'"
        ) from error


def channels_of(engine: Engine) -> Channels:
    assert engine.channels is not None, "graphs are captured by processes that run one rank each"
    return engine.channels


def part(run: Callable[[], Any], channels: Channels, after: Part | None = None) -> Part:
    """What `run` does, as a graph; with the memory of the part `after` which it is replayed."""
    graph, pool = torch.cuda.CUDAGraph(), None if after is None else after.graph.pool()
    with channels.lines_used() as lines, capturing(graph, pool):
        run()
    return Part(graph, channels.device, lines)


def capture_parts(engine: Engine, seed: int, step: int) -> Capture:
    """The prefix as a graph of its own, which may be replayed twice, and the rest. All that the prefix sends or has
    posted must have arrived at its end: a graph cannot wait for what another began."""
    runner = engine.runners[0]
    environment: Environment = {}
    received: set[str] = set()
    made: list[BatchResults] = []

    def warm_up() -> None:
        environment.update(runner.given(engine.inputs(engine.static.rows, runner, seed)))
        finished(runner.warm_up(environment, step))
        received.update(runner.transport.join())

    def complete() -> None:
        made.append(engine.results([finished(runner.complete(environment, step))]))

    prefix = part(warm_up, channels_of(engine))
    whole = part(complete, channels_of(engine), after=prefix)
    watched = tuple(runner.watched or ())
    return Capture(whole, made[0], prefix, frozenset(received), watched)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """What ends a capture is raised, and not what torch says of one that was ended; the stream is that of before."""
    stream, failure = torch.cuda.current_stream(), None
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            try:
                yield
            except BaseException as error:
                failure = error
                raise
    except BaseException as error:
        torch.cuda.set_stream(stream)
        first = failure or error
        raise first from first.__cause__


def finished(run: Generator[Wait, None, T]) -> T:
    """The result of a run whose messages arrive by themselves."""
    return take_turns([run])[0]
