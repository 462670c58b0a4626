"""What the user calls: `step(*inputs, *targets, **kwargs) -> loss`, over processes or in one. A `Worker` does it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from zbfx._torch.compiling import uncompiled
from zbfx.arguments import true_or_false
from zbfx.compiled import Compiled
from zbfx.errors import ZbfxError
from zbfx.runtime import on_disk, saving
from zbfx.runtime.being_saved import Saved
from zbfx.runtime.buckets import refuse_padding
from zbfx.runtime.clipping import checked_norms, clip
from zbfx.runtime.delivery import Delivery
from zbfx.runtime.engine import Engine
from zbfx.runtime.forwards import forwarded
from zbfx.runtime.pace import Pace
from zbfx.runtime.timeline import Profile, Recorder
from zbfx.runtime.worker import Worker
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
    "plan_split",
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

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.no_parameter = nn.Parameter(torch.empty(0, device=worker.engine.pipe.device))
        self.clips: set[str] = set()  # the calls of `clip_grad_norm_` whose arguments were compared

    def __repr__(self) -> str:
        pipe, own = self.engine.pipe, [runner.rank for runner in self.engine.runners]
        ranks = f"rank {own[0]}" if len(own) == 1 else f"ranks {own[0]} to {own[-1]}"
        stages = ", ".join(str(stage) for stage, rank in enumerate(pipe.placement) if rank in own)
        ended = ", closed" if self.worker.is_closed else "" if self.worker.fault is None else ", failed"
        return (
            f"Step({ranks} of {pipe.schedule.costs.rank_count}, stages {stages}, backend {pipe.options.backend}, "
            f"count {self.count}{ended})"
        )

    def __dir__(self) -> list[str]:
        return [*dir(object), *OFFERED]

    def __deepcopy__(self, memo: object) -> Step:
        return self.__reduce__()  # type: ignore[return-value]

    def __reduce__(self) -> str:
        raise ZbfxError(
            "a step holds connections, graphs and the model itself, and cannot be copied or pickled: bind the pipeline "
            "again for another one; step.save(folder) keeps what training goes on from"
        )

    @property
    def count(self) -> int:
        """The number of training steps so far, on which random numbers depend. Set it to go on from a checkpoint."""
        return self.worker.count

    @count.setter
    def count(self, value: int) -> None:
        self.worker.count = value

    @property
    def verdict(self) -> str | None:
        """Why the gradients of the last step were dropped; None: they were not."""
        return self.worker.verdict

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """The losses of the last step's microbatches, on the rank that computes them."""
        return self.worker.losses

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """The metrics of the last step or evaluation, by name, on every rank."""
        return self.worker.metrics

    @property
    def engine(self) -> Engine:
        """Runs batches of the shapes that were compiled for."""
        return self.worker.engine

    @property
    def microbatches(self) -> int:
        return self.engine.pipe.reduction.microbatches

    @property
    def pipelines(self) -> tuple[Compiled, ...]:
        """The pipeline that was compiled, and those made since for other shapes and for evaluation."""
        return tuple(engine.pipe for engine in self.worker.engines)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters whose gradients arise in this process, under the model's names."""
        return iter(self.engine.parameters.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of `named_parameters()`. A process without any gives an empty one: optimizers take no empty list."""
        return iter(self.engine.parameters.values() or (self.no_parameter,))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this process's stages use. What forwards write, one rank alone writes: the copies that other
        ranks have in the model stay as they were."""
        names, named = self.engine.tensor_names, self.worker.tensors.named
        return ((name, t) for name, t in named.items() if name in names and not isinstance(t, nn.Parameter))

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.worker.alone():
            return self.worker.trained(partial(self.worker.engines.batch, args, kwargs))

    @uncompiled
    def run_split(self, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Tensor:
        """One step from microbatches that are cut already: (positional, keyword) arguments of each, in a list like
        `[((inputs, targets), {}), ...]`. With on_new_shape="symbolic" or "recompile" their shapes may differ, and their
        number may be any; that of each replica, too (docs/unlike.md)."""
        with self.worker.alone():
            self.compare_padding(batches, "run_split")
            apart = not self.worker.options.refuses_shapes
            return self.worker.trained(partial(self.worker.engines.split_batch, batches, "run_split"), apart=apart)

    @uncompiled
    def evaluate_split(self, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Tensor:
        """The loss of microbatches that are cut already, in eval mode, as `evaluate` gives it of a batch: a scalar, on
        every rank. They come as to `run_split`, any number of them, of any shapes that it takes. Raises `InputError`
        for others, on all ranks alike."""
        with self.worker.alone():
            self.compare_padding(batches, "evaluate_split")
            self.worker.settle_optimizer()
            self.worker.begin("evaluate_split", batch=True)
            take = partial(self.worker.engines.evaluated_batch, batches, "evaluate_split")
            results = self.worker.run(*self.worker.admit(take, evaluation=True, apart=True))
            self.worker.metrics = results.metrics
            assert results.loss is not None, "evaluations have a loss"
            return results.loss

    @uncompiled
    def plan_split(self, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> None:
        """Plan the step of such microbatches ahead, and make its program, so that `run_split` finds both: their shapes
        count, not their values. Any rank may call it, at any time between steps; it waits for no other. Raises
        `InputError` for what `run_split` refuses."""
        with self.worker.alone():
            self.worker.engines.plan_ahead(batches)

    def compare_padding(self, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]], call: str) -> None:
        """Refuse buckets whose padding changes the loss of the microbatch that grows most, on the first call on which
        one grows on any rank. Where a rank cannot take its batch, nothing is compared: `call` refuses it, on all
        ranks."""
        engines = self.worker.engines
        if not engines.awaits_padding:
            return
        most = engines.most_padded(batches, call)
        self.worker.begin(call)
        grown = self.worker.guarded(lambda: self.worker.ranks.before_step(None if most is None else most[0]))
        if most is None or None in grown or not any(grown):
            return
        pair, metrics, found = most[1], self.worker.metrics, list[Tensor]()
        for as_they_are in (True, False):
            self.worker.settle_optimizer()
            self.worker.begin("evaluate_split", batch=True)
            take = partial(self.worker.engines.evaluated_batch, [pair], call, as_they_are=as_they_are)
            loss = self.worker.run(*self.worker.admit(take, evaluation=True, apart=True)).loss
            assert loss is not None, "evaluations have a loss"
            found.append(loss)
        self.worker.metrics = metrics
        plain, padded = found
        refuse_padding(plain, padded, {parameter.dtype for parameter in self.worker.source.model.parameters()})
        engines.padding_is_compared = bool(plain.isfinite())  # else it says nothing of padding

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
        with self.worker.alone():
            wanted = EVALUATION if outputs is None else replace(EVALUATION, selection=Selection(outputs))
            results, found = forwarded(self.worker, "evaluate", args, kwargs, wanted, Delivery(join, everywhere))
            self.worker.metrics = results.metrics
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
        with self.worker.alone():
            in_eval = not true_or_false("train", train)
            wanted = Wanted(trains=False, in_eval=in_eval, has_loss=False, selection=Selection(outputs))
            _, found = forwarded(self.worker, "forward", args, kwargs, wanted, Delivery(join, everywhere))
            return found

    @uncompiled
    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run one step (its gradients count) and return the measured timeline of all ranks, on every rank."""
        with self.worker.alone():
            self.worker.begin("profile")
            self.worker.begin(self.worker.numbered, batch=True)
            engine, rows = self.worker.admit(partial(self.worker.engines.batch, args, kwargs))
            recorders = [Recorder(engine.pipe.device) for _ in engine.runners]
            with engine.recorded(recorders):
                self.worker.train(engine, rows)
                own = [tuple(recorder.spans()) for recorder in recorders]
                everywhere = self.worker.guarded(lambda: self.worker.ranks.along(own))
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
        with self.worker.alone():
            self.worker.agreed("replan", partial(self.refuse_replan, profile), {"profile": profile is not None})
            self.worker.settle_optimizer()
            own = self.engine.seconds if profile is None else profile.seconds
            everywhere = self.worker.guarded(lambda: self.worker.ranks.everywhere(own))
            slowest = {
                part: max(found.get(part, 0.0) for found in everywhere) for found in everywhere for part in found
            }
            before = self.engine.pipe
            pipe = self.worker.guarded(lambda: self.worker.engines.variants.reordered(before, slowest))
            if pipe is not before:
                self.worker.guarded(lambda: self.worker.engines.replace_first(pipe))
            return pipe is not before

    def refuse_replan(self, profile: Profile | None) -> None:
        if self.worker.ranks.shards > 1:
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
        with self.worker.alone():
            self.worker.refuse_ended()
            largest, kind = checked_norms(max_norm, norm_type)
            self.worker.settle_optimizer()
            call = f"clip_grad_norm_({largest!r}, {kind!r})"
            if call not in self.clips:  # ranks wait for each other's arguments once; other calls have other names
                self.worker.agreed("clip_grad_norm_", lambda: None, {"max_norm": largest, "norm_type": kind})
                self.clips.add(call)
            self.worker.begin(call)
            ranks, named = self.worker.ranks, self.worker.source.named
            return self.worker.guarded(lambda: clip(self.engine, ranks, named, largest, kind))

    def collect(self) -> None:
        """With ZeRO-1: give the model's parameters their values after the optimizer's step, on all ranks together. The
        next step does it by itself."""
        with self.worker.alone():
            self.worker.refuse_ended()
            self.worker.settle_optimizer()
            if self.engine.shards is not None:
                self.worker.begin("collect")
                self.worker.guarded(self.engine.collect)
                self.engine.shards.collected()

    @uncompiled
    def full_state_dict(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """The whole model's `state_dict`, on the CPU: on the first process, others get an empty one, or `everywhere`.
        Tensors travel one after the other, from the rank that has them. All ranks call it. Buffers that forwards write
        are those of the first replica, or of each process's own replica. Raises `ZbfxError` where a tensor has no
        data."""
        with self.worker.alone():
            self.collect()
            return on_disk.full_state_dict(self.worker, everywhere)

    @uncompiled
    def export(self, folder: str | os.PathLike[str], *, dtype: Any = None, max_shard_size: int | str = "5GB") -> None:
        """Write the whole model as safetensors, in several files with an index where it is larger than `max_shard_size`
        (bytes, or text like "5GB"). A model of the transformers library is written as by `save_pretrained`, which
        `from_pretrained` loads. `dtype`: that of the floating tensors in the files; None: as they are. All ranks call
        it; the first process holds the whole model in the host's memory and writes the files, into a folder that may
        exist. Returns on all ranks once they are there. Raises `ZbfxError` where they cannot be written."""
        with self.worker.alone():
            self.collect()
            on_disk.export(self.worker, folder, dtype, max_shard_size)

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
        with self.worker.alone():
            self.collect()
            return saving.save_step(self.worker, folder, keep, async_, frozen, objects)

    @uncompiled
    def load(self, folder: str | os.PathLike[str], *, missing_ok: bool = False, **objects: Any) -> Path | None:
        """Go on from the newest checkpoint of `save` in a folder, or from one by its own path, which is returned. The
        model's tensors, `count`, the seed and the `objects` get their values in place. None with `missing_ok` where
        there is no checkpoint. Nothing is unpickled. Raises `ZbfxError`, by name, for what does not fit, before
        anything changes; if files are damaged, some tensors may have changed by then."""
        with self.worker.alone():
            self.collect()
            return saving.load_step(self.worker, folder, missing_ok, objects)

    @uncompiled
    def close(self) -> None:
        """End the step: let go of its captured graphs, and close its connections. All ranks call this before
        `destroy_process_group`, which may wait for ever for a communicator that a graph still holds."""
        with self.worker.alone():
            self.worker.end()
