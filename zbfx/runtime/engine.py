"""A pipeline's programs on live tensors, for one shape of microbatch: what a step runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zbfx import rng
from zbfx.comm.channels import Channels
from zbfx.comm.group import GroupTransport
from zbfx.comm.local import LocalTransport, Mailbox
from zbfx.comm.together import waiting
from zbfx.compiled import Compiled
from zbfx.errors import InputError
from zbfx.graphs import LOSS, Phase
from zbfx.program import ops
from zbfx.program.boxed import Boxed
from zbfx.program.codegen import Program, Result
from zbfx.program.messages import buffer_holders, parameter_holders
from zbfx.program.reductions import RankReductions
from zbfx.runtime.flat import Shards
from zbfx.runtime.pace import ActionKind, Drift, Pace
from zbfx.runtime.runner import RankRunner, Tensors, Wait
from zbfx.runtime.timeline import Recorder
from zbfx.trace.signature import on_device

T = TypeVar("T")


@dataclass(frozen=True)
class BatchResults:
    """What a batch makes beside gradients: the losses of its microbatches and the outputs, by port, on the rank that
    computes them, and on every rank the loss (None: there is none) and the metrics."""

    losses: tuple[Tensor, ...]
    loss: Tensor | None
    metrics: Mapping[str, Tensor]
    outputs: Mapping[str, Sequence[Tensor]]

    def cloned(self) -> BatchResults:
        """Copies of all but the losses of microbatches, for results in memory that a later run writes."""
        return replace(
            self,
            loss=None if self.loss is None else self.loss.clone(),
            metrics={name: value.clone() for name, value in self.metrics.items()},
            outputs={name: [value.clone() for value in values] for name, values in self.outputs.items()},
        )


@dataclass
class Engine:
    """The runners of the ranks in this process. `weight` is the gradient of the batch's loss by a microbatch's, and
    `loss_gradient`, which every backward starts from, `scale()` times that: both are rewritten before each run.
    `channels` lead to the other ranks and replicas, if any; `counts` are the numbers of microbatches of the replicas;
    `held_bytes` is what programs hold at their worst; `static` and `captured` belong to captured steps; `runs`
    counts."""

    pipe: Compiled
    runners: Sequence[RankRunner]
    channels: Channels | None = None
    counts: tuple[int, ...] = ()  # (): all have that of the pipeline
    scale: Callable[[], float] = lambda: 1.0
    held_bytes: Mapping[int, float] = field(default_factory=dict)  # by rank, where a limit is to be kept
    static: Any = None
    captured: Any = None
    runs: int = 0

    def __post_init__(self) -> None:
        self.counts = self.counts or (self.pipe.reduction.microbatches,) * self.replicas
        self.weight = self.pipe.reduction.zeros(self.pipe.device)
        self.loss_gradient = torch.zeros_like(self.weight, dtype=self.pipe.reduction.dtype)
        for runner in self.runners:
            if self.pipe.trains and self.pipe.device.type == "cpu":
                runner.pace = Pace(runner.rank)  # the host does the work, and times it without a wait
            runner.summarize = lambda *terms: self.summary(terms)

    @property
    def shards(self) -> Shards | None:
        """With ZeRO-1, this replica's parts of the parameters."""
        return self.runners[0].shards

    @property
    def tensor_names(self) -> set[str]:
        """The parameters and buffers that these ranks' stages use."""
        return {name for runner in self.runners for name in runner.tensor_names}

    @property
    def elsewhere(self) -> set[str]:
        """The parameters and buffers that stages of other processes alone use."""
        stages, placement = self.pipe.stages, self.pipe.placement
        return {*parameter_holders(stages, placement), *buffer_holders(stages, placement)} - self.tensor_names

    def share(self, first: Engine) -> None:
        """Use the tensors for gradients, and the scale, of the engine that was made first."""
        self.scale = first.scale
        for runner, other in zip(self.runners, first.runners, strict=True):
            runner.share(other)

    def run_phases_by(self, compiler: Callable[[Phase], Boxed]) -> None:
        """Run the phases as the backend says."""
        for call in (call for runner in self.runners for call in runner.calls):
            call.run = compiler(call.phase)

    def run_phases_as(self, other: Engine) -> None:
        """Run the phases as another engine of the same stages does."""
        runs = {call.phase.name: call.run for runner in other.runners for call in runner.calls}
        self.run_phases_by(lambda phase: runs[phase.name])

    @property
    def paces(self) -> list[Pace]:
        """Those of the ranks in this process; none on GPUs, where the host only launches."""
        return [runner.pace for runner in self.runners if runner.pace is not None]

    def paced(self, number: int) -> list[Drift]:
        """A training step of this number has ended; the actions that take longer from now on."""
        return [drift for pace in self.paces for drift in pace.end_step(number)]

    @property
    def seconds(self) -> dict[ActionKind, float]:
        """What an action of the ranks in this process takes, by kind and stage."""
        return {part: seconds for pace in self.paces for part, seconds in pace.seconds.items()}

    def forget(self) -> None:
        """Let go of captured graphs; the next run is a first one."""
        self.captured, self.runs = None, 0

    @contextmanager
    def recorded(self, recorders: Sequence[Recorder]) -> Iterator[None]:
        """Meanwhile each runner marks its actions with its recorder."""
        for runner, recorder in zip(self.runners, recorders, strict=True):
            runner.recorder = recorder
        try:
            yield
        finally:
            for runner in self.runners:
                runner.recorder = None

    def start_clocks(self) -> None:
        """Let the recorders, if there are any, begin together, on all ranks."""
        recorders = [runner.recorder for runner in self.runners if runner.recorder is not None]
        if recorders and self.channels is not None:
            self.channels.barrier()
        for recorder in recorders:
            recorder.begin()

    def collect(self) -> None:
        assert self.shards is not None, "with ZeRO-1"
        assert self.channels is not None, "with ZeRO-1"
        for flat in self.shards.flat.values():
            self.channels.join_shards(flat).wait()

    def whole_norms(self, norms: Tensor) -> Tensor:
        """The norms of what an optimizer steps, from those of this replica's part of it."""
        if self.shards is None:
            return norms
        squares = norms.square()
        assert self.channels is not None, "with ZeRO-1"
        self.channels.sum_over_replicas(squares).wait()
        return squares.sqrt()

    def with_data(self, rows: Sequence[Sequence[Tensor]]) -> Batch:
        """A batch, if the tensors that this process reads have data: others may be on the meta device."""
        read = {name for runner in self.runners for name in runner.input_names}
        for row in rows:
            for spec, tensor in zip(self.pipe.signature.tensors, row, strict=True):
                if tensor.is_meta and spec.name in read:
                    raise InputError(f"{spec.name}: expected a tensor with data, found one on the meta device")
        return self, rows

    @property
    def replica(self) -> int:
        return self.channels.place.replica if self.channels else 0

    @property
    def replicas(self) -> int:
        return len(self.channels.place.replicas) if self.channels else 1

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of these ranks under the model's names, in its order; with ZeRO-1 this replica's shards."""
        if self.runners[0].shards is not None:
            return self.runners[0].shards.parameters
        found = {name for runner in self.runners for name in runner.parameters}
        named = self.runners[0].tensors.named
        return {name: t for name, t in named.items() if name in found and isinstance(t, nn.Parameter)}

    def weigh(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Set the gradient that each backward starts from."""
        names = [spec.name for spec in self.pipe.signature.tensors]
        named = [dict(zip(names, row, strict=True)) for row in rows]
        tokens = self.pipe.tokens(named)
        if tokens is not None and self.channels and self.replicas > 1:
            tokens = on_device(tokens, self.pipe.device)
            with waiting(self.channels.name, "the other replicas, one of which"):
                self.channels.sum_over_replicas(tokens).wait()
        self.pipe.reduction.weigh(self.weight, tokens, sum(self.counts))
        self.rescale()

    def scale_by(self, scale: Callable[[], float]) -> None:
        self.scale = scale

    def rescale(self) -> None:
        self.loss_gradient.copy_(self.weight * self.scale())

    def summary(self, terms: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The loss and the metrics of the batch over all replicas, from those of this one's microbatches: all losses,
        then all values of each part of a metric. On the rank that has them."""
        count = self.pipe.reduction.microbatches
        columns = [torch.stack(self.by_row(terms[k : k + count])) for k in range(0, len(terms), count)]
        if self.channels and self.replicas > 1:
            columns = together(columns, self.channels.from_replicas, self.counts)
        losses, *values = columns
        return (self.pipe.reduction.combine(losses.unbind(), self.weight), *metrics_of_batch(self.pipe, values))

    def by_row(self, values: Sequence[T]) -> list[T]:
        """What each microbatch of the programs has made, in the order of the batch."""
        return [value for _, value in sorted(zip(self.pipe.order, values, strict=True), key=lambda pair: pair[0])]

    def inputs(self, rows: Sequence[Sequence[Tensor]], runner: RankRunner, seed: int) -> list[ops.Microbatch]:
        """The microbatches with the tensors that a rank reads, on its device, with the strides of the trace."""
        device, names = self.pipe.device, runner.input_names
        first = sum(self.counts[: self.replica])  # random numbers are those of one process with all batches
        read = {
            k: {
                s.name: ops.laid_out(on_device(t, device), s)
                for s, t in zip(specs, row, strict=True)
                if s.name in names
            }
            for k, row in enumerate(rows)
            for specs in [self.pipe.specs(k)]
        }
        return [ops.Microbatch(read[k], rng.mix(seed, first + k)) for k in self.pipe.order]

    def run(self, rows: Sequence[Sequence[Tensor]], seed: int, step: int) -> BatchResults:
        """Run all programs."""
        runs = [runner.run(self.inputs(rows, runner, seed), step) for runner in self.runners]
        return self.results(take_turns(runs))

    def results(self, found: Sequence[Mapping[Result, Tensor]]) -> BatchResults:
        """What the programs of this process's ranks have returned."""
        own: dict[str, list[Tensor]] = defaultdict(list)  # by microbatch of the programs, then by row
        for result, value in (pair for of_rank in found for pair in of_rank.items()):
            if result.microbatch is not None:
                own[result.name].append(value)
        summary = [found[0][Result(name, None)] for name, _ in self.runners[0].program.chain.summary]
        metrics = zip((kind.name for kind in self.pipe.joint.metrics), summary[1:], strict=True)
        own = {name: self.by_row(values) for name, values in own.items()}
        losses = tuple(own.pop(LOSS, ()))
        return BatchResults(losses, summary[0] if summary else None, dict(metrics), own)


def together(columns: Sequence[Tensor], gather: Callable[[Tensor], Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Each column of values, from all replicas, in one exchange, byte for byte. `counts` are their lengths there."""
    longest = max(counts)
    columns = [filled(column, longest) for column in columns]
    if len(columns) == 1:
        found = [gather(columns[0])]
    else:
        bits = [column.contiguous().reshape(-1).view(torch.uint8) for column in columns]
        parts = gather(torch.cat(bits)).split([len(part) for part in bits], dim=1)
        pairs = zip(parts, columns, strict=True)
        found = [part.contiguous().view(column.dtype).view(len(counts), *column.shape) for part, column in pairs]
    return [torch.cat([column[:count] for column, count in zip(of_all, counts, strict=True)]) for of_all in found]


def filled(column: Tensor, length: int) -> Tensor:
    """The column, with zeros behind it."""
    short = length - len(column)
    return torch.cat([column, column.new_zeros(short, *column.shape[1:])]) if short else column


def metrics_of_batch(pipe: Compiled, values: Sequence[Tensor]) -> list[Tensor]:
    """The metrics of the batch, from all values of each of their parts."""
    remaining = iter(values)
    return [kind.of_batch(*(next(remaining) for _ in kind.parts)) for kind in pipe.joint.metrics]


Batch = tuple[Engine, Sequence[Sequence[Tensor]]]  # what runs a call, and the tensors of its microbatches


def take_turns(runs: Sequence[Generator[Wait, None, T]]) -> list[T]:
    """Run each generator until it waits, in turn, until all have ended."""
    results: dict[int, T] = {}
    waits: dict[int, Wait] = {}
    while len(results) < len(runs):
        before = (len(results), dict(waits))
        for index, run in enumerate(runs):
            if index not in results:
                try:
                    waits[index] = next(run)
                except StopIteration as end:
                    results[index] = end.value
                    waits.pop(index, None)
        waiting = ", ".join(f"{index} waits for {wait.key}" for index, wait in sorted(waits.items()))
        assert before != (len(results), waits), f"programs deadlock: {waiting}"
    return [results[index] for index in range(len(runs))]


def local_runners(pipe: Compiled, programs: Sequence[Program], tensors: Tensors, mailbox: Mailbox) -> list[RankRunner]:
    """Runners of all ranks in this process: the first holder of a shared gradient adds it up."""
    runners = []
    for program in programs:
        adds = {gradient.name for gradient in pipe.shared_gradients if gradient.holders[0] == program.rank}
        transport = LocalTransport(f"rank {program.rank}", program.messages, mailbox)
        runners.append(RankRunner(program, tensors, transport, adds))
    return runners


def rank_engine(pipe: Compiled, tensors: Tensors, channels: Channels) -> Engine:
    """One rank, whose messages go over `channels` (opened by whoever calls this on every rank)."""
    program = pipe.program(channels.place.rank)
    reductions = pipe.reductions[program.rank] if pipe.reductions else RankReductions(())
    sharded = {bucket.key for bucket in reductions.shards if not bucket.shared}
    transport = GroupTransport(program.messages, channels, sharded=sharded)
    adds = {gradient.name for gradient in pipe.shared_gradients}
    return Engine(pipe, [RankRunner(program, tensors, transport, adds)], channels)
