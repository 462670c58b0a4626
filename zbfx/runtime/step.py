"""What the user calls: `step(*inputs, *targets, **kwargs) -> loss`, over processes or in one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from zbfx import rng
from zbfx._torch.compiling import uncompiled
from zbfx.arguments import true_or_false
from zbfx.comm.channels import Channels
from zbfx.comm.overdue import say
from zbfx.compiled import Compiled
from zbfx.errors import NonFiniteStep, PipelineFault, ZbfxError
from zbfx.graphs import Phase
from zbfx.program.boxed import Boxed, boxed
from zbfx.runtime import on_disk, saving
from zbfx.runtime.captured import Launched
from zbfx.runtime.clipping import checked_norms, clip
from zbfx.runtime.delivery import Delivery
from zbfx.runtime.engine import Batch, BatchResults, Engine, T
from zbfx.runtime.engines import Engines, MakesFurther
from zbfx.runtime.forwards import forwarded
from zbfx.runtime.optimizer import Optimizer
from zbfx.runtime.options import StepOptions
from zbfx.runtime.pace import Pace
from zbfx.runtime.ranks import Ranks
from zbfx.runtime.runner import Tensors
from zbfx.runtime.saving import Saved
from zbfx.runtime.survival import Survival
from zbfx.runtime.timeline import Profile, Recorder
from zbfx.runtime.verdict import settle, snapshot
from zbfx.runtime.watch import Watch
from zbfx.trace.generation import refuse_generation
from zbfx.trace.guard import Source
from zbfx.trace.left_behind import LookOut
from zbfx.trace.wanted import EVALUATION, Selection, Wanted

OFFERED = (
    "clip_grad_norm_",
    "close",
    "collect",
    "count",
    "evaluate",
    "evaluate_split",
    "export",
    "forward",
    "full_state_dict",
    "load",
    "metrics",
    "named_buffers",
    "named_parameters",
    "parameters",
    "pipelines",
    "pace",
    "profile",
    "replan",
    "run_split",
    "save",
    "verdict",
)  # what `dir(step)` shows: what users call and read


class Step:
    """One training step of a pipeline: forward, backward and gradients of a full batch.

    `step(*args, **kwargs)` takes the arguments of the example microbatch with the batch dimension `microbatches`
    times as long, the same on every rank, and returns the loss of the batch on every rank. Its gradients are in `.grad`
    of `parameters()` by then, added to what was there. The loss is a plain tensor without a graph: `loss.backward()` is
    torch's error that it "does not require grad". `step.evaluate` takes the same and runs the forward alone, in eval
    mode; `step.forward` returns outputs of the model. `metrics`, by name and on every rank, are those of the last
    step or evaluation. Where losses and gradients are checked, `verdict` says why the last step's gradients were
    dropped; None: they were not.

    When a rank of several processes fails, every rank raises `PipelineFault` with that rank's message, and the step
    cannot be used after that."""

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
        trained = {name: p for runner in engine.runners for name, p in runner.parameters.items()}
        self.source, self.reorder = source, variants.reordered
        self.watch = Watch(source, engine.pipe.device, trained | engine.parameters, engine.pipe.joint.replaced)
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
        self.no_parameter = nn.Parameter(torch.empty(0, device=engine.pipe.device))
        self.optimizer: Optimizer | None = None
        self.survival: Survival | None = None  # what goes on when other processes end
        self.clips: set[str] = set()  # the calls of `clip_grad_norm_` whose arguments were compared
        self.fault: str | None = None  # why no further step can run
        self.is_closed = False
        self.saving: Saved | None = None  # the last checkpoint, perhaps on its way
        self.lock = threading.RLock()  # held by the thread that is inside a call

    def __repr__(self) -> str:
        pipe, own = self.engine.pipe, [runner.rank for runner in self.engine.runners]
        ranks = f"rank {own[0]}" if len(own) == 1 else f"ranks {own[0]} to {own[-1]}"
        stages = ", ".join(str(stage) for stage, rank in enumerate(pipe.placement) if rank in own)
        ended = ", closed" if self.is_closed else "" if self.fault is None else ", failed"
        return (
            f"Step({ranks} of {pipe.schedule.costs.rank_count}, stages {stages}, backend {pipe.options.backend}, "
            f"count {self.count}{ended})"
        )

    def __dir__(self) -> list[str]:
        return [*dir(object), *OFFERED]

    @property
    def count(self) -> int:
        """The number of training steps so far, on which random numbers depend. Set it to go on from a checkpoint."""
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ZbfxError(f"count is the number of training steps so far, an integer >= 0; found {value!r}")
        self._count = value

    def is_bound(self) -> bool:
        """Whether calls may follow that train the model."""
        return not self.is_closed

    @property
    def microbatches(self) -> int:
        return self.engine.pipe.reduction.microbatches

    @property
    def tensors(self) -> Tensors:
        return self.engine.runners[0].tensors

    @property
    def engine(self) -> Engine:
        """What runs batches of the shapes that were compiled for."""
        return self.engines.first

    @property
    def pipelines(self) -> tuple[Compiled, ...]:
        """The pipeline that was compiled, and those made since for other shapes and for evaluation."""
        return tuple(engine.pipe for engine in self.engines)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters whose gradients arise in this process, under the model's names."""
        return iter(self.engine.parameters.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of `named_parameters()`. A process without any gives an empty one: optimizers take no empty list."""
        return iter(self.engine.parameters.values() or (self.no_parameter,))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this process's stages use. What forwards write, one rank alone writes: the copies that other
        ranks have in the model stay as they were."""
        names, named = self.engine.tensor_names, self.tensors.named
        return ((name, t) for name, t in named.items() if name in names and not isinstance(t, nn.Parameter))

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.alone():
            return self.trained(partial(self.engines.batch, args, kwargs))

    @uncompiled
    def run_split(self, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Tensor:
        """One step from microbatches that are cut already: (positional, keyword) arguments of each, in a list like
        `[((inputs, targets), {}), ...]`. With on_new_shape="symbolic" or "recompile" their shapes may differ, and their
        number may be any; that of each replica, too (docs/unlike.md)."""
        with self.alone():
            apart = not self.options.refuses_shapes
            return self.trained(partial(self.engines.split_batch, batches, "run_split"), apart=apart)

    @uncompiled
    def evaluate_split(self, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Tensor:
        """The loss of microbatches that are cut already, in eval mode, as `evaluate` gives it of a batch: a scalar, on
        every rank. They come as to `run_split`, any number of them, of any shapes that it takes. Raises `InputError`
        for others, on all ranks alike."""
        with self.alone():
            if self.optimizer is not None:
                self.optimizer.settle()
            self.begin("evaluate_split", batch=True)
            take = partial(self.engines.evaluated_batch, batches, "evaluate_split")
            results = self.run(*self.admit(take, evaluation=True, apart=True))
            self.metrics = results.metrics
            assert results.loss is not None, "evaluations have a loss"
            return results.loss

    @overload
    def evaluate(self, *args: Any, outputs: None = None, **kwargs: Any) -> Tensor: ...
    @overload
    def evaluate(
        self, *args: Any, outputs: Any, everywhere: bool = False, join: int | None = 0, **kwargs: Any
    ) -> tuple[Tensor, Any]: ...
    @uncompiled
    def evaluate(
        self, *args: Any, outputs: Any = None, everywhere: bool = False, join: int | None = 0, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Any]:
        """The loss of a batch in eval mode: no gradients, no activations kept. The batch has any whole number of
        microbatches. Nothing of training moves on: what an evaluation draws at random, it draws for the next step's
        `count`, again each time. With `outputs`, as in `forward`, it returns (loss, outputs)."""
        with self.alone():
            wanted = EVALUATION if outputs is None else replace(EVALUATION, selection=Selection(outputs))
            results, found = forwarded(self, "evaluate", args, kwargs, wanted, Delivery(join, everywhere))
            self.metrics = results.metrics
            assert results.loss is not None, "evaluations have a loss"
            return results.loss if outputs is None else (results.loss, found)

    @uncompiled
    def forward(
        self,
        *args: Any,
        outputs: Any = None,
        train: bool = False,
        everywhere: bool = False,
        join: int | None = 0,
        **kwargs: Any,
    ) -> Any:
        """The model's outputs of a batch of any whole number of microbatches: no loss, no gradients. It takes the
        model's arguments, as the example has them or as the model's own forward takes others.

        outputs     what is returned: a path of attributes, keys and indices into what the model returns ("logits",
                    "hidden_states.-1"); a function `(outputs, *targets) -> tensors`, which runs in the stage that has
                    its arguments, on a microbatch, with the positional arguments after those of the model as
                    `targets`; a list, tuple or dict of these; None: all that the model returns. Nothing else is held
        train       run the modules in the modes that they were compiled in: dropout draws, batch norm updates its
                    buffers, as in a plain forward. False: in eval mode
        everywhere  each rank of the pipeline gets all outputs. False: those that it computes, None for others
        join        the dimension along which outputs of microbatches are joined; scalars make a row. None: a list of
                    what each microbatch returns

        Each new `outputs`, mode and shape is traced and planned once, at its first call. All ranks call it alike.
        Raises `InputError` for what the model does not return, `ZbfxError` for arguments that do not fit."""
        with self.alone():
            in_eval = not true_or_false("train", train)
            wanted = Wanted(trains=False, in_eval=in_eval, has_loss=False, selection=Selection(outputs))
            _, found = forwarded(self, "forward", args, kwargs, wanted, Delivery(join, everywhere))
            return found

    @uncompiled
    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run one step (its gradients count) and return the measured timeline of all ranks, on every rank."""
        with self.alone():
            self.begin("profile")
            self.begin(self.numbered, batch=True)
            engine, rows = self.admit(partial(self.engines.batch, args, kwargs))
            recorders = [Recorder(engine.pipe.device) for _ in engine.runners]
            with engine.recorded(recorders):
                self.train(engine, rows)
                own = [tuple(recorder.spans()) for recorder in recorders]
                everywhere = self.guarded(lambda: self.ranks.along(own))
            return Profile(engine.pipe.schedule, tuple(spans for process in everywhere for spans in process))

    @property
    def pace(self) -> tuple[Pace, ...]:
        """How long actions of the ranks in this process take, step by step, and since when one takes longer; empty on
        GPUs, where the host only launches. A drift is printed as it is found."""
        return tuple(self.engine.paces)

    @uncompiled
    def replan(self, profile: Profile | None = None) -> bool:
        """Order the actions anew for what they take now: on the slowest replica, the median of the last steps, or a
        `profile`, which GPUs need. Returns whether a faster order was found. The cut and all values stay; gradients of
        microbatches may be added up in another order. All ranks call it. Raises `ZbfxError` with shards of a model
        along "tp", or where nothing has been measured."""
        with self.alone():
            self.agreed("replan", partial(self.refuse_replan, profile), {"profile": profile is not None})
            if self.optimizer is not None:
                self.optimizer.settle()
            own = self.engine.seconds if profile is None else profile.seconds
            everywhere = self.guarded(lambda: self.ranks.everywhere(own))
            slowest = {
                part: max(found.get(part, 0.0) for found in everywhere) for found in everywhere for part in found
            }
            before = self.engine.pipe
            pipe = self.guarded(lambda: self.reorder(before, slowest))
            if pipe is not before:
                self.guarded(lambda: self.engines.replace_first(pipe))
            return pipe is not before

    def refuse_replan(self, profile: Profile | None) -> None:
        if self.ranks.shards > 1:
            raise ZbfxError("shards of a model run one order, which was planned for all: bind again to plan anew")
        if profile is None and not self.engine.seconds:
            raise ZbfxError(
                "nothing has been measured: replan follows some training steps on the CPU. On GPUs pass what "
                "step.profile(...) returned"
            )

    @uncompiled
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over the whole model is `max_norm` at most; returns the norm before.

        It is that of `torch.nn.utils.clip_grad_norm_` on a model in one process: over all ranks and shards, with shared
        parameters counted once, and replicas, whose gradients are summed already, not added up. All ranks call it.
        """
        with self.alone():
            self.refuse_ended()
            largest, kind = checked_norms(max_norm, norm_type)
            if self.optimizer is not None:
                self.optimizer.settle()
            call = f"clip_grad_norm_({largest!r}, {kind!r})"
            if call not in self.clips:  # ranks wait for each other's arguments once; other calls have other names
                self.agreed("clip_grad_norm_", lambda: None, {"max_norm": largest, "norm_type": kind})
                self.clips.add(call)
            self.begin(call)
            return self.guarded(lambda: clip(self.engine, self.ranks, self.source.named, largest, kind))

    def collect(self) -> None:
        """With ZeRO-1: give the model's parameters their values after the optimizer's step, on all ranks together. The
        next step does it by itself."""
        with self.alone():
            self.refuse_ended()
            if self.optimizer is not None:
                self.optimizer.settle()
            if self.engine.shards is not None:
                self.begin("collect")
                self.guarded(self.engine.collect)
                self.engine.shards.collected()

    @uncompiled
    def full_state_dict(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """The whole model's `state_dict`, on the CPU: on the first process, others get an empty one, or `everywhere`.
        Tensors travel one after the other, from the rank that has them. All ranks call it. Buffers that forwards write
        are those of the first replica, or of each process's own replica. Raises `ZbfxError` where a tensor has no
        data."""
        with self.alone():
            self.collect()
            return on_disk.full_state_dict(self, everywhere)

    @uncompiled
    def export(self, folder: str | os.PathLike[str], *, dtype: Any = None, max_shard_size: int | str = "5GB") -> None:
        """Write the whole model as safetensors, in several files with an index where it is larger than `max_shard_size`
        (bytes, or text like "5GB"). A model of the transformers library is written as by `save_pretrained`, which
        `from_pretrained` loads. `dtype`: that of the floating tensors in the files; None: as they are. All ranks call
        it; the first process holds the whole model in the host's memory and writes the files, into a folder that may
        exist. Returns on all ranks once they are there. Raises `ZbfxError` where they cannot be written."""
        with self.alone():
            self.collect()
            on_disk.export(self, folder, dtype, max_shard_size)

    @uncompiled
    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = None,
        async_: bool = False,
        frozen: bool = True,
        **objects: Any,
    ) -> Saved:
        """Write a checkpoint into `folder`, as `step-100` after 100 steps; `keep` the last so many of them. It has the
        model, `count`, the seed, and the `objects`: optimizers, and whatever has `state_dict` and `load_state_dict`. A
        step of any ranks, cut, replicas and `zero` loads it. All ranks call it with the same arguments, and one folder.
        A checkpoint that a failure leaves incomplete is none. `async_`: go on as soon as all is copied to the host's
        memory; the next `save`, `load` or `close`, and `wait()` of the result, wait for the disk. `frozen`: with what
        no step changes; without it, as for adapters, `load` leaves that as it is. Raises `ZbfxError` on all ranks where
        one cannot write, or an object's state is more than plain data."""
        with self.alone():
            self.collect()
            return saving.save_step(self, folder, keep, async_, frozen, objects)

    @uncompiled
    def load(self, folder: str | os.PathLike[str], *, missing_ok: bool = False, **objects: Any) -> Path | None:
        """Go on from the newest checkpoint of `save` in a folder, or from one by its own path, which is returned. The
        model's tensors, `count`, the seed and the `objects` get their values in place. None with `missing_ok` where
        there is no checkpoint. Nothing is unpickled. Raises `ZbfxError`, by name, for what does not fit, before
        anything changes; if files are damaged, some tensors may have changed by then."""
        with self.alone():
            self.collect()
            return saving.load_step(self, folder, missing_ok, objects)

    @uncompiled
    def close(self) -> None:
        """End the step: let go of its captured graphs, and close its connections. All ranks call this before
        `destroy_process_group`, which may wait for ever for a communicator that a graph still holds."""
        with self.alone():
            self.is_closed |= not self.ranks.are_open
            if self.fault is None and not self.is_closed:
                if self.optimizer is not None:
                    self.optimizer.settle()
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
        """Begin a call, and do `work` on every rank. What one refuses, all refuse, as they do arguments that differ."""
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
