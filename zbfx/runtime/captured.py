"""How a rank's program runs: phase by phase from Python, with compiled phases, or as one captured CUDA graph.

eager               the phases' aten ops, launched from Python
inductor            each phase compiled by inductor, after the split
cudagraph           the whole step of the rank, sends and receives included, captured once and replayed (in two parts
                    where an optimizer step is validated between them)
cudagraph+inductor  compiled phases, captured
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from zbfx.comm.copies import CopyLine
from zbfx.errors import InputError, ZbfxError
from zbfx.runtime.engine import Engine, take_turns
from zbfx.runtime.rank_step import RankStep
from zbfx.runtime.runner import Environment, Wait, restore
from zbfx.runtime.timeline import Recorder
from zbfx.trace.signature import on_device
from zbfx.variants import FORWARD

if TYPE_CHECKING:
    from zbfx.pipeline import Pipeline

T = TypeVar("T")

BACKENDS = ("eager", "inductor", "cudagraph", "cudagraph+inductor")


def checked_backend(backend: str, device: torch.device) -> str:
    if backend not in BACKENDS:
        raise ZbfxError(f"backend is one of {', '.join(BACKENDS)}; found {backend!r}")
    if backend.startswith("cudagraph") and device.type != "cuda":
        raise ZbfxError(
            f"backend={backend!r} captures CUDA graphs and needs a CUDA device; found {device}. Use 'eager'"
        )
    return backend


@dataclass(frozen=True)
class Part:
    """A CUDA graph, and the lines to other ranks that it works on."""

    graph: torch.cuda.CUDAGraph
    device: torch.device
    lines: Sequence[CopyLine]

    def replay(self) -> None:
        """After what was begun on its lines outside of graphs, and before what will be: a line does one thing at a
        time."""
        current = torch.cuda.current_stream(self.device)
        for line in self.lines:
            current.wait_stream(line.stream)
        self.graph.replay()
        for line in self.lines:
            line.stream.wait_stream(current)


@dataclass
class Capture:
    """A rank's step as a CUDA graph, with the loss that it writes."""

    whole: Part
    loss: Tensor
    prefix: Part | None = None  # what runs before the verdict on an optimizer step
    received: frozenset[str] = frozenset()  # messages for later that the prefix receives
    watched: tuple[Any, ...] = ()
    tensors: Sequence[Tensor] = ()  # parameters, buffers and gradients: `model.to(...)` there and back moves them
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
class Static:
    """What the graphs of an engine read: a batch, and the rank's parameters and buffers."""

    rows: list[list[Tensor]]
    tensors: list[Tensor]


class CapturedStep(RankStep):
    """A step as one CUDA graph, or two where an optimizer step is validated between them.

    The first run of an engine is eager, and warms everything up; the second captures, without running anything, and
    replays; later ones copy the batch into static buffers and replay.

    Random ops draw from the device's default generator, in program order: masks differ from those of other backends.
    Evaluation runs eagerly.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.engine.runners[0].keep_gradients = True

    def build(self, pipe: Pipeline) -> Engine:
        engine = super().build(pipe)
        # One set of gradient buffers for all shapes.
        engine.runners[0].keep_gradients, engine.runners[0].kept = True, self.engine.runners[0].kept
        return engine

    def check_model(self, *, evaluation: bool = False) -> None:
        super().check_model(evaluation=evaluation)
        waits = self.optimizer is not None and self.optimizer.pending is not None
        if waits and any(e.captured is not None and e.captured.is_left for e in (self.engine, *self.others.values())):
            # To capture anew settles the step before the forwards; ranks whose tensors came back to the same places
            # settle it after theirs.
            raise InputError(
                "the model was moved while an optimizer step waits for its verdict. Call optimizer.settle(), on all "
                "ranks, before model.to(...)"
            )

    def execute(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        runner = engine.runners[0]
        if engine.pipe.schedule.name == FORWARD:
            return super().execute(engine, rows)
        if engine.runs == 0:
            device = engine.pipe.device
            engine.static = Static(
                [[tensor.to(device, copy=True) for tensor in row] for row in rows],
                [self.tensors.named[name] for name in sorted(runner.tensor_names)],
            )
            return super().execute(engine, engine.static.rows)
        for static_row, row in zip(engine.static.rows, rows, strict=True):
            for static, tensor in zip(static_row, row, strict=True):
                static.copy_(on_device(tensor, static.device))
        starts = engine.captured is None or not engine.captured.serves(runner.recorder)
        if starts:
            self.settle_first(runner)
            tensors = [*engine.static.tensors, *runner.kept.values()]
            engine.captured = replace(
                self.capture(engine),
                tensors=tensors,
                addresses=tuple(map(Tensor.data_ptr, tensors)),
                recorder=runner.recorder,
            )
        captured: Capture = engine.captured
        if runner.recorder is not None:
            self.channels.barrier()
            runner.recorder.start = runner.recorder.mark()
        buffers = runner.written_early() if runner.pending else {}
        if captured.prefix is not None:
            captured.prefix.replay()
        if runner.pending is not None:
            assert captured.prefix is not None, "an optimizer waits for its verdict"
            if finished(runner.settle(self.count, warmed_up=True, received=captured.received)):
                restore(buffers)
                captured.prefix.replay()
        if not starts:
            runner.start_gradients()
        captured.whole.replay()
        runner.transport.finish()  # the verdict that was passed on, which no graph holds
        if runner.watched is not None:
            runner.watched[:] = captured.watched
        return captured.loss.clone()

    def capture(self, engine: Engine) -> Capture:
        torch.cuda.synchronize()
        engine.captured = None  # two graphs would hold the memory of two steps
        runner = engine.runners[0]
        runner.start(engine.loss_gradient)
        if runner.watched is not None:
            runner.watched.clear()
        try:
            if runner.program.chain.validates:
                return self.capture_parts(engine)
            whole = self.part(lambda: self.run_program(engine, engine.static.rows))
            return Capture(whole, engine.batch_loss, watched=tuple(runner.watched or ()))
        except RuntimeError as error:
            raise ZbfxError(
                f"this step cannot be captured as a CUDA graph: {error}. Use backend='eager' or 'inductor'"
            ) from error

    def part(self, run: Callable[[], Any], after: Part | None = None) -> Part:
        """What `run` does, as a graph; with the memory of the part `after` which it is replayed."""
        graph, pool = torch.cuda.CUDAGraph(), None if after is None else after.graph.pool()
        with self.channels.lines_used() as lines, capturing(graph, pool):
            run()
        return Part(graph, self.channels.device, lines)

    def capture_parts(self, engine: Engine) -> Capture:
        """The prefix as a graph of its own, which may be replayed twice, and the rest. All that the prefix sends or has
        posted must have arrived at its end: a graph cannot wait for what another began."""
        runner = engine.runners[0]
        environment: Environment = {}
        received: set[str] = set()

        def warm_up() -> None:
            environment.update(runner.given(engine.inputs(engine.static.rows, runner, self.seed_of_step())))
            finished(runner.warm_up(environment, self.count))
            received.update(runner.transport.join())

        def complete() -> None:
            self.losses = finished(runner.complete(environment, self.count))

        prefix = self.part(warm_up)
        whole = self.part(complete, after=prefix)
        return Capture(whole, engine.batch_loss, prefix, frozenset(received), tuple(runner.watched or ()))


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
