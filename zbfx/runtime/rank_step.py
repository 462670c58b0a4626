"""A step over torch.distributed: this process's rank of a pipeline, and what becomes of it when another one fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from zbfx.comm.channels import Channels
from zbfx.comm.group import GroupTransport
from zbfx.comm.history import CLOSE
from zbfx.comm.together import agreed
from zbfx.errors import InputError, PipelineFault, ZbfxError
from zbfx.plan import Schedule
from zbfx.program.codegen import Program
from zbfx.program.ops import Transport
from zbfx.runtime.agreement import batch_hashes, refuse_other_batches
from zbfx.runtime.engine import Engine, message_pairs, rank_engine
from zbfx.runtime.loading import load
from zbfx.runtime.runner import RankRunner, Tensors
from zbfx.runtime.step import CLOSED, Batch, Step, StepOptions
from zbfx.runtime.timeline import Profile, Recorder
from zbfx.runtime.verdict import problems
from zbfx.variants import FORWARD

if TYPE_CHECKING:
    from zbfx.pipeline import Pipeline

T = TypeVar("T")

LOADS = ("cuda",)  # devices on which a first call may wait for all others


class RankStep(Step):
    """This process's rank of a pipeline over torch.distributed.

    When a rank fails, every rank raises `PipelineFault` with that rank's message. The step cannot be used after that.
    """

    def __init__(self, engine: Engine, options: StepOptions, channels: Channels, tensors: Tensors) -> None:
        super().__init__(engine, options)
        self.channels, self.tensors = channels, tensors
        self.refusals = 0
        self.shapes: Mapping[str, tuple[int, ...]] = {}  # of the last call's batch
        self.compared: set[str] = set()  # the kinds of calls whose first batch was the same on all ranks

    def close(self) -> None:
        """End the step: let go of its captured graphs, and close its connections.

        All ranks call this before `torch.distributed.destroy_process_group`, which may wait for ever for a communicator
        that a graph still holds.
        """
        if self.fault is None and not self.channels.are_open():
            self.fault = CLOSED
        super().close()

    def begin(self, call: str, *, batch: bool = False) -> None:
        self.refuse_ended()
        self.channels.history.begin(call, batch=batch)

    def agreed(self, call: str, work: Callable[[], T], arguments: Mapping[str, object]) -> T:
        self.begin(call)
        names = self.channels.place.names()

        def gather(own: Any) -> list[Any]:
            return self.guarded(lambda: self.channels.gather(own))

        found: T = agreed(call, work, arguments, gather, names)
        return found

    def given(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        if self.channels.control is None:  # else once all replicas are known to have such a batch
            self.channels.history.given(shapes)

    def let_go(self) -> None:
        self.begin(CLOSE)
        # Ranks that go on without this one find that it closed; those that have told of their calls, the difference.
        if (found := self.channels.history.difference()) is not None:
            self.channels.first_fault(found)
        if self.engine.pipe.device.type == "cuda":
            torch.cuda.synchronize(self.engine.pipe.device)
        for engine in (self.engine, *self.others.values()):
            engine.captured = None
        self.channels.close()

    def refuse_ended(self) -> None:
        super().refuse_ended()
        if not self.channels.are_open():
            raise ZbfxError(
                "the process groups of this step are gone: destroy_process_group was called after bind. Call "
                "step.close() before it; to go on, call init_process_group and bind the pipeline again"
            )

    def admit(self, take: Callable[[], Batch]) -> Batch:
        """Before the first send: what one replica refuses, all refuse, and all have batches of the same shapes."""
        try:
            batch = take() if self.channels.control is None else self.admit_together(take)
            self.compare_first(batch)
            return batch
        except InputError as error:
            self.refusals += 1
            self.channels.history.refused()
            if not self.channels.all_arrive(f"refused {self.refusals}"):
                # The other ranks took their batches and wait for this one: they must hear of it.
                self.drop()
                self.fault = self.channels.fail(error)
            raise
        except PipelineFault as error:
            self.fault = self.channels.fail(error)
            raise PipelineFault(self.fault) from error

    def check_model(self, *, evaluation: bool = False) -> None:
        super().check_model(evaluation=evaluation)
        shards = self.engine.runners[0].shards
        if shards is not None:
            shards.check(self.tensors.named)

    def compare_first(self, batch: Batch) -> None:
        """The first batch is the same in all bits on every rank. Later ones are not compared: that would make the ranks
        wait for each other, and on a GPU for the device."""
        engine, rows = batch
        call = "evaluate" if engine.pipe.schedule.name == FORWARD else "step"
        if call not in self.compared:
            names = [spec.name for spec in engine.pipe.signature.tensors]
            refuse_other_batches(self.channels, batch_hashes(names, rows))
            self.compared.add(call)

    def admit_together(self, take: Callable[[], Batch]) -> Batch:
        batch, refusal = None, None
        try:
            batch = take()
        except InputError as error:
            refusal = error
        own = None if batch is None else [len(batch[1]), *(tuple(tensor.shape) for tensor in batch[1][0])]
        everywhere = self.channels.gather_peers((own, str(refusal)))
        if refusal is not None:
            raise refusal
        for replica, (shapes, text) in enumerate(everywhere):
            if shapes is None:
                raise InputError(f"replica {replica} refused its batch: {text}")
            if shapes != own:
                raise InputError(
                    f"all replicas take batches of the same shapes; found (microbatches, shapes of one) {own} in "
                    f"replica {self.channels.place.replica}, {shapes} in replica {replica}"
                )
        assert batch is not None, "refused above"
        self.channels.history.given(self.shapes)
        return batch

    def plan(self, find: Callable[[Any], Schedule]) -> Schedule:
        if len(self.channels.place.replicas) > 1:  # each has a batch of its own, and all reduce in one order
            return find(self.engine.pipe.schedule)
        first: Any = self.channels.gather_ranks(find(self.engine.pipe.request))[0]
        return first

    def build(self, pipe: Pipeline) -> Engine:
        self.channels.open(message_pairs(pipe))
        engine = rank_engine(pipe, self.tensors.of(pipe.joint), self.channels)
        runner, first = engine.runners[0], self.engine.runners[0]
        runner.flat, runner.shards = first.flat, first.shards  # one set of flat tensors for all shapes
        return engine

    def run(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        def work() -> Tensor:
            engine.weigh(rows)
            loss = self.execute(engine, rows)
            engine.runners[0].finish_gradients()
            return loss

        loss = self.guarded(work)
        engine.runs += 1
        return loss

    def guarded(self, work: Callable[[], T]) -> T:
        self.refuse_ended()
        try:
            with self.channels.watched():
                return work()
        except BaseException as error:
            self.drop()
            self.fault = self.channels.fail(error)
            if not isinstance(error, Exception):  # Ctrl-C and exit stay what they are
                raise
            raise PipelineFault(self.fault) from error

    def transports(self, programs: Sequence[Program], pairs: Collection[tuple[int, int]]) -> list[Transport]:
        (program,) = programs
        self.channels.open(pairs)
        return [GroupTransport(program.messages, self.channels)]

    def add_up(self, state: Tensor) -> None:
        self.channels.add_up(state)

    def everywhere(self, value: Any) -> list[Any]:
        return self.channels.gather(value)

    def problems(self, engine: Engine) -> list[str]:
        own = problems(self.channels.name, self.losses, engine.parameters)
        everywhere: list[Any] = self.guarded(lambda: self.channels.gather(own))
        return sorted((found for rank in everywhere for found in rank), key=lambda text: "gradient" in text)

    def whole_norms(self, norms: Tensor) -> Tensor:
        if self.engine.runners[0].shards is None:
            return norms
        squares = norms.square()
        self.channels.sum_over_replicas(squares).wait()
        return squares.sqrt()

    def collect(self) -> None:
        """With ZeRO-1: give the model's parameters their values after the optimizer's step, on all ranks together. The
        next step does it by itself."""
        with self.alone():
            self.refuse_ended()
            if self.optimizer is not None:
                self.optimizer.settle()
            shards = self.engine.runners[0].shards
            if shards is not None:
                self.begin("collect")
                self.guarded(lambda: [self.channels.join_shards(flat).wait() for flat in shards.flat.values()])

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run one step (its gradients count) and return the measured timeline of all ranks, on every rank."""
        with self.alone():
            self.begin("profile")
            self.begin(self.numbered, batch=True)
            return self.profiled(*self.admit(partial(self.batch, args, kwargs)))

    def profiled(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Profile:
        runner = engine.runners[0]
        recorder = runner.recorder = Recorder(engine.pipe.device)
        try:
            self.train(engine, rows)
            spans = self.guarded(lambda: self.channels.gather_ranks(tuple(recorder.spans())))
        finally:
            runner.recorder = None
        return Profile(engine.pipe.schedule, tuple(spans))

    def execute(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        runner = engine.runners[0]
        loads = engine.runs == 0 and engine.pipe.device.type in LOADS
        if loads:
            self.settle_first(runner)
        runner.start(engine.loss_gradient)
        if loads:
            inputs = engine.inputs(rows, runner, self.seed_of_step())
            load(runner, engine.pipe.stages, inputs, self.count, engine.pipe.device)
            del inputs  # the run makes its own
        if runner.recorder is not None:
            self.channels.barrier()
            runner.recorder.begin()
        return self.run_program(engine, rows)

    def settle_first(self, runner: RankRunner) -> None:
        """Settle the last optimizer step before a run in which its gradients are bound anew, and not within it."""
        if self.optimizer is not None and self.optimizer.pending is not None:
            self.optimizer.learn()
        runner.pending = None

    def run_program(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        self.losses = engine.run(rows, self.seed_of_step(), self.count)
        return engine.batch_loss
