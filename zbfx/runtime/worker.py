"""The work of a step in one process: its calls begin, take batches, run, fail and end as those of all ranks do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from zbfx import rng
from zbfx.comm.channels import Channels
from zbfx.comm.overdue import say
from zbfx.errors import NonFiniteStep, PipelineFault, ZbfxError
from zbfx.graphs import Phase
from zbfx.program.boxed import Boxed, boxed
from zbfx.runtime.being_saved import Saved
from zbfx.runtime.captured import Launched
from zbfx.runtime.checked_values import failed, refuse_failed
from zbfx.runtime.engine import Batch, BatchResults, Engine, T
from zbfx.runtime.engines import Engines, MakesFurther
from zbfx.runtime.optimizer import Optimizer
from zbfx.runtime.options import StepOptions
from zbfx.runtime.ranks import Ranks
from zbfx.runtime.runner import Tensors
from zbfx.runtime.survival import Survival
from zbfx.runtime.verdict import settle, snapshot
from zbfx.runtime.watch import Watch
from zbfx.trace.generation import refuse_generation
from zbfx.trace.guard import Source
from zbfx.trace.left_behind import LookOut


class Worker:
    """Does the work of a `Step` in one process. All ranks make the same calls in the same order.

    A call of the user's is made `alone`. It begins (`begin`, or `agreed` where arguments are compared), takes its batch
    if it has one (`admit`), and does what other ranks wait for (`guarded`). If that fails on one rank, all ranks raise,
    and `fault` says from then on why no call can run."""

    def __init__(
        self,
        engine: Engine,
        options: StepOptions,
        ranks: Ranks,
        launch: Launched,
        source: Source,
        variants: MakesFurther,
        compiler: Callable[[Phase], Boxed] = boxed,
    ) -> None:
        self.options, self.ranks, self.launch, self.modes = options, ranks, launch, source.modes
        self.source = source
        trained = {name: p for runner in engine.runners for name, p in runner.parameters.items()}
        held = engine.pipe.joint.replaced, self.constants
        self.watch = Watch(source, engine.pipe.device, trained | engine.parameters, *held)
        self.engines = Engines(engine, options, ranks, launch, variants, self.watch.check_tensors, compiler)
        self.look_out = LookOut({name: source.named[name] for name in engine.elsewhere}, self.unsettled)
        if self.look_out.elsewhere or engine.shards is not None:
            self.look_out.watch(source.model, source.loss_fn)
        if self.look_out.elsewhere:
            refuse_generation(self.is_bound, source.model)
        self.verdict: str | None = None
        self.losses: tuple[Tensor, ...] = ()  # of the last step's microbatches, on the rank that computes them
        self.metrics: Mapping[str, Tensor] = {}  # of the last step or evaluation, by name, on every rank
        self.count = 0
        self.optimizer: Optimizer | None = None
        self.survival: Survival | None = None  # what goes on when other processes end
        self.fault: str | None = None  # why no further step can run
        self.is_closed = False
        self.saving: Saved | None = None  # the last checkpoint, perhaps on its way
        self.lock = threading.RLock()  # held by the thread that is inside a call

    @property
    def count(self) -> int:
        """The number of training steps so far, on which random numbers depend. Set it to go on from a checkpoint."""
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ZbfxError(f"count is the number of training steps so far, an integer >= 0; found {value!r}")
        self._count = value

    def constants(self) -> list[Tensor]:
        """The tensors beside parameters, buffers and batches that graphs read."""
        return [tensor for engine in self.engines for tensor in engine.pipe.joint.constants.values()]

    def is_bound(self) -> bool:
        """Whether calls may follow that train the model."""
        return not self.is_closed

    @property
    def tensors(self) -> Tensors:
        return self.engine.runners[0].tensors

    @property
    def engine(self) -> Engine:
        """Runs batches of the shapes that were compiled for."""
        return self.engines.first

    @property
    def numbered(self) -> str:
        """The next step among the calls of a rank: ranks whose `count` differs draw other random numbers."""
        return f"step {self.count + 1}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A call of the user's, in the modes that the pipeline was compiled for. Refuses calls that begin inside those
        of another thread: both would use the same connections and gradients. Another rank might let such calls pass in
        another order, so they do not wait for each other either."""
        if not self.lock.acquire(blocking=False):
            raise ZbfxError(
                "a thread is inside a call of this step, and another one calls it; expected one call after the other, "
                "in the same order on every rank. Make all calls in one thread, or bind a pipeline for each"
            )
        try:
            with self.modes.fixed():
                yield
        finally:
            self.lock.release()

    def begin(self, call: str, *, batch: bool = False) -> None:
        """A call that every rank makes begins; `batch`: the shapes of its batch follow."""
        self.refuse_ended()
        if self.optimizer is not None:
            self.optimizer.refuse_calls()
        self.ranks.begin(call, batch=batch)

    def agreed(self, call: str, work: Callable[[], T], arguments: Mapping[str, object]) -> T:
        """Begin a call, and do `work` on every rank. If one rank refuses, or arguments differ, all ranks refuse."""
        self.begin(call)
        return self.ranks.agreed(call, work, arguments, self.guarded)

    def refuse_ended(self) -> None:
        """Raises `ZbfxError` if no step can run any more."""
        if self.is_closed:
            raise ZbfxError("this step was closed; bind the pipeline again to go on")
        if self.fault is not None:
            raise PipelineFault(
                f"this pipeline has failed before and cannot go on; bind it again. It failed with: {self.fault}"
            )
        if not self.ranks.are_open:
            raise ZbfxError(
                "the process groups of this step are gone: destroy_process_group was called after bind. Call "
                "step.close() before it; to go on, call init_process_group and bind the pipeline again"
            )

    def admit(self, take: Callable[[], Batch], *, evaluation: bool = False, apart: bool = False) -> Batch:
        """The engine and microbatches of a call, once all ranks and replicas have one like it. `apart`: `take` settles
        with them which batches they have."""
        self.refuse_ended()

        def taken() -> Batch:
            with self.engines.mixing.refusing() if apart else nullcontext():
                self.check_model(evaluation=evaluation)
            return take()

        try:
            return self.ranks.admit(taken, apart=apart)
        except PipelineFault as error:
            self.fail(error)
            raise PipelineFault(self.fault or str(error)) from error
        except BaseException as error:
            if not isinstance(error, Exception) or not self.ranks.all_refuse():
                self.fail(error)  # the other ranks took their batches and wait for this one
            raise

    def check_model(self, *, evaluation: bool = False) -> None:
        """Raises `InputError` if the model has changed in what its graph or its tensors do not follow."""
        self.watch.check(lambda: self.engines.tensor_names, evaluation=evaluation)
        if self.engine.shards is not None:
            self.engine.shards.check(self.tensors.named)
        if self.optimizer is not None and self.optimizer.pending is not None:
            self.launch.check_pending(self.engines)

    def attach(self, optimizer: Optimizer, scale: Callable[[], float]) -> None:
        """Run from now on with `optimizer`, whose steps are validated while the next step warms up; backwards start
        from `scale()` times the gradient of the loss."""
        if self.options.checks:
            raise ZbfxError(
                f"on_nonfinite={self.options.on_nonfinite!r} checks at the end of every step, which is a barrier; the "
                f"optimizer checks too: leave it out, and give the optimizer check_finite=True"
            )
        if self.survival is not None:
            raise ZbfxError(
                "survive=True runs a failed step again from the state before it, and an optimizer whose steps are "
                "validated afterwards may be in between: use the optimizer as it is, without PostValidated"
            )
        if self.optimizer is not None:
            raise ZbfxError("this step has an optimizer; bind the pipeline again for another one")
        self.optimizer = optimizer
        self.look_out.watch(self.source.model, self.source.loss_fn)
        if not optimizer.sync:
            self.engines.validate(optimizer.layout.chain, optimizer.layout.size)
        self.engines.restart()
        self.engine.scale_by(scale)

    def survive(self, channels: Channels) -> None:
        """Go on training when other processes end."""
        self.survival = Survival(self, channels)

    def trained(self, take: Callable[[], Batch], *, apart: bool = False) -> Tensor:
        """Begin and run a training step; `apart` as in `admit`."""
        if self.survival is None:
            self.begin(self.numbered, batch=True)
            return self.train(*self.admit(take, apart=apart))
        self.refuse_ended()
        if not self.survival.generation:
            self.begin(self.numbered, batch=True)

        def taken() -> Batch:
            self.check_model()
            return take()

        self.look_out.trains()
        return self.counted(self.survival.train(taken))

    def counted(self, results: BatchResults) -> Tensor:
        """A step is over."""
        self.losses, self.metrics, loss = results.losses, results.metrics, results.loss
        assert loss is not None, "steps have a loss"
        self.count += 1
        return loss

    def train(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        for runner in engine.runners:
            if self.optimizer is not None:
                runner.follow(self.optimizer.pending, self.optimizer.seen.get(runner.rank))
        before = snapshot(engine.parameters) if self.options.checks else {}
        self.look_out.trains()
        self.guarded(partial(self.ranks.check_batch, self.count + 1, (engine, rows)))
        loss = self.counted(self.run(engine, rows))
        if self.optimizer is not None:
            self.optimizer.explain()
        if not self.options.checks:
            return loss
        found = self.guarded(lambda: self.ranks.problems(engine, self.losses))
        self.verdict = settle(found, before, engine.parameters)
        if self.verdict is not None and self.options.raises:
            raise NonFiniteStep(self.verdict)
        return loss

    def run(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> BatchResults:
        """Run the engine's programs; if that fails, the other ranks hear of it."""
        results = self.guarded(lambda: self.compute(engine, rows))
        if engine.shards is not None:
            engine.shards.collected()
        return results

    def compute(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> BatchResults:
        engine.weigh(rows)
        settle = partial(self.settle_first, engine)
        results = self.launch.run(engine, rows, self.seed_of_step(), self.count, settle)
        if self.launch.judges_checks and engine.pipe.checks_values:
            own = [text for r in engine.runners for text in failed(r.checks or (), r.transport.name, self.count)]
            refuse_failed([text for texts in self.ranks.everywhere(own) for text in texts])
        for runner in engine.runners:
            runner.finish_gradients()
        engine.runs += 1
        for drift in engine.paced(self.count + 1) if engine.pipe.trains else ():
            say(f"rank {drift.rank}: {drift}. step.replan(), on all ranks, plans for it")
        return results

    def unsettled(self) -> str | None:
        """What keeps this rank's own tensors from being final; None: they are."""
        if self.optimizer is not None and self.optimizer.pending is not None:
            return "an optimizer step waits for its verdict. Call optimizer.settle(), on all ranks, before"
        if self.engine.shards is not None and not self.engine.shards.is_collected:
            return "with zero=1, replicas have stepped their shards alone. Call step.collect(), on all ranks, before"
        return None

    def settle_optimizer(self) -> None:
        """Settle the optimizer step that waits for its verdict, if there is one."""
        if self.optimizer is not None:
            self.optimizer.settle()

    def settle_first(self, engine: Engine) -> None:
        """Settle the last optimizer step before a run in which its gradients are bound anew, and not within it."""
        if self.optimizer is not None and self.optimizer.pending is not None:
            self.optimizer.learn()
        for runner in engine.runners:
            runner.follow(None, runner.watched)

    def guarded(self, work: Callable[[], T]) -> T:
        """Do what other ranks wait for; if it fails, they hear of it."""
        self.refuse_ended()
        try:
            with self.ranks.watched():
                return work()
        except BaseException as error:
            self.fail(error)
            if self.fault is None or not isinstance(error, Exception):  # Ctrl-C and exit stay what they are
                raise
            raise PipelineFault(self.fault) from error

    def fail(self, error: BaseException) -> None:
        """No further step can run, unless nobody else takes part: the others and the user hear why."""
        self.fault = self.ranks.fail(error, self.drop)

    def drop(self) -> None:
        """Forget what is on its way, after a failure: messages that wait keep connections open."""
        runners = [runner for engine in self.engines for runner in engine.runners]
        for runner in runners + (self.optimizer.runners if self.optimizer else []):
            runner.transport.drop()

    def seed_of_step(self) -> int:
        assert self.options.seed is not None, "resolved as the step was made"
        return rng.mix(self.options.seed, self.count)

    def end(self) -> None:
        """Let go of captured graphs and close the connections, once all ranks are here."""
        self.is_closed |= not self.ranks.are_open
        if self.fault is None and not self.is_closed:
            self.settle_optimizer()
            last, self.saving = self.saving, None
            if last is not None:
                last.finish()
            if self.engine.pipe.device.type == "cuda":
                torch.cuda.synchronize(self.engine.pipe.device)
            self.guarded(self.ranks.check_batches)
            if self.survival is not None:
                self.survival.leave()
            self.ranks.leave()
            for engine in self.engines:
                engine.forget()
            self.ranks.close()
            self.is_closed = True
            if last is not None:
                last.wait()
