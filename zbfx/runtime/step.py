"""What the user calls: `step(*inputs, *targets, **kwargs) -> loss`, over processes or in one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from zbfx import rng
from zbfx.arguments import checked_seed, kind_of
from zbfx.errors import InputError, NonFiniteStep, PipelineFault, ZbfxError
from zbfx.program.codegen import Program
from zbfx.program.ops import Transport
from zbfx.runtime.engine import Engine
from zbfx.runtime.verdict import checked_choice, settle, snapshot
from zbfx.runtime.watch import Watch
from zbfx.schedule.schedule import Schedule
from zbfx.trace.signature import is_pair
from zbfx.variants import Variants

if TYPE_CHECKING:
    from zbfx.optim import PostValidated
    from zbfx.pipeline import Pipeline

T = TypeVar("T")

CLOSED = "this step was closed"

Batch = tuple[Engine, Sequence[Sequence[Tensor]]]  # what runs a call, and the tensors of its microbatches

NEW_SHAPES = ("refuse", "recompile", "symbolic")
PAIRS = "a list of (positional arguments, keyword arguments), like ((inputs, targets), {}), one for each microbatch"


@dataclass(frozen=True, slots=True)
class StepOptions:
    """`seed` fixes the random numbers. `on_nonfinite`: "keep", "drop" or "raise" (`zbfx.runtime.verdict`).
    `on_new_shape`: "refuse" a batch of other shapes than the example's, "recompile" for it, once per shape, or trace
    "symbolic" sizes once and put in those of every further shape (`zbfx.variants`)."""

    seed: int
    on_nonfinite: str = "keep"
    on_new_shape: str = "refuse"

    def __post_init__(self) -> None:
        checked_seed(self.seed)
        checked_choice(self.on_nonfinite)
        if self.on_new_shape not in NEW_SHAPES:
            raise ZbfxError(f"on_new_shape is one of {NEW_SHAPES}; found {self.on_new_shape!r}")


class Step(ABC):
    """One training step of a pipeline: forward, backward and gradients of a full batch.

    `step(*args, **kwargs)` takes the arguments of the example microbatch with the batch dimension `microbatches`
    times as long, the same on every rank, and returns the loss of the batch on every rank. Its gradients are added to
    `.grad` of `parameters()`. `step.evaluate` takes the same and runs the forward alone, in eval mode. Where losses
    and gradients are checked, `verdict` says why the last step's gradients were dropped; None: they were not.
    """

    def __init__(self, engine: Engine, options: StepOptions) -> None:
        self.engine, self.options = engine, options
        self.others: dict[tuple[object, ...], Engine] = {}  # for other shapes, and for evaluation
        self.variants = Variants(engine.pipe, self.plan, symbolic=options.on_new_shape == "symbolic")
        pipe, trained = engine.pipe, {name: p for runner in engine.runners for name, p in runner.parameters.items()}
        parameters = trained | engine.parameters
        self.watch = Watch(pipe.guard, pipe.model, pipe.loss_fn, pipe.device, parameters, pipe.joint.replaced)
        self.verdict: str | None = None
        self.losses: tuple[Tensor, ...] = ()  # of the last step's microbatches, on the rank that computes them
        self.count = 0
        self.optimizer: PostValidated | None = None
        self.fault: str | None = None  # why no further step can run
        self.lock = threading.RLock()  # held by the thread that is inside a call

    @property
    def count(self) -> int:
        """The number of training steps so far, on which random numbers depend; evaluations are none. Set it to go on
        from a checkpoint."""
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ZbfxError(f"count is the number of training steps so far, an integer >= 0; found {value!r}")
        self._count = value

    @property
    def microbatches(self) -> int:
        return self.engine.pipe.reduction.microbatches

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters whose gradients arise in this process, under the model's names."""
        return iter(self.engine.parameters.items())

    def parameters(self) -> Iterator[nn.Parameter]:
        return iter(self.engine.parameters.values())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that this process's stages use. What forwards write, one rank alone writes: the copies that other
        ranks have in the model stay as they were."""
        names = {name for runner in self.engine.runners for name in runner.tensor_names}
        named = self.engine.runners[0].tensors.named
        return ((name, t) for name, t in named.items() if name in names and not isinstance(t, nn.Parameter))

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.alone():
            self.begin(self.numbered, batch=True)
            return self.train(*self.admit(partial(self.batch, args, kwargs)))

    @property
    def numbered(self) -> str:
        """The next step among the calls of a rank: ranks whose `count` differs draw other random numbers."""
        return f"step {self.count + 1}"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuses calls that begin inside those of another thread: both would use the same connections and gradients.
        Another rank might let such calls pass in another order, so they do not wait for each other either."""
        if not self.lock.acquire(blocking=False):
            raise ZbfxError(
                "a thread is inside a call of this step, and another one calls it; expected one call after the other, "
                "in the same order on every rank. Make all calls in one thread, or bind a pipeline for each"
            )
        try:
            yield
        finally:
            self.lock.release()

    def batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        self.check_model()
        engine = self.engine_for(args, kwargs, self.microbatches, evaluation=False)
        return with_data(engine, engine.pipe.signature.split(args, kwargs, self.microbatches))

    def run_split(self, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Tensor:
        """One step from microbatches that are cut already: (positional, keyword) arguments of each, in a list like
        `[((inputs, targets), {}), ...]`."""
        with self.alone():
            self.begin(self.numbered, batch=True)
            return self.train(*self.admit(partial(self.split_batch, batches)))

    def split_batch(self, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Batch:
        if not isinstance(batches, Sequence) or isinstance(batches, str):
            raise InputError(f"run_split takes {PAIRS}; found {kind_of(batches)}")
        for index, pair in enumerate(batches):
            if not is_pair(pair):
                raise InputError(f"run_split takes {PAIRS}; found {kind_of(pair)} for microbatch {index}")
        if len(batches) != self.microbatches:
            raise InputError(f"expected {self.microbatches} microbatches, found {len(batches)}")
        self.check_model()
        signature = self.engine.pipe.signature
        self.given(signature.batch_shapes(self.microbatches))
        return with_data(self.engine, [signature.split(args, kwargs, 1)[0] for args, kwargs in batches])

    def check_model(self, *, evaluation: bool = False) -> None:
        """Raises `InputError` if the model has changed in what its graph or its tensors do not follow."""
        self.watch.check(self.tensor_names, evaluation=evaluation)

    def tensor_names(self) -> set[str]:
        """The parameters and buffers that this process reads."""
        engines = (self.engine, *self.others.values())
        return {name for engine in engines for runner in engine.runners for name in runner.tensor_names}

    def train(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """The graphs hold their gradients and casts: neither autograd nor an autocast around the step adds any."""
        with torch.no_grad(), torch.autocast(engine.pipe.device.type, enabled=False):
            for runner in engine.runners:
                runner.pending = self.optimizer.pending if self.optimizer else None
                runner.watched = self.optimizer.seen.get(runner.rank) if self.optimizer else None
            checked = self.options.on_nonfinite != "keep"
            before = snapshot(engine.parameters) if checked else {}
            loss = self.run(engine, rows)
            self.count += 1
            if self.optimizer is not None:
                self.optimizer.explain()
            if not checked:
                return loss
            self.verdict = settle(self.problems(engine), before, engine.parameters)
            if self.verdict is not None and self.options.on_nonfinite == "raise":
                raise NonFiniteStep(self.verdict)
            return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch in eval mode: no gradients, no activations kept. The batch has any whole number of
        microbatches. Nothing of training moves on: what an evaluation draws at random, it draws for the next step's
        `count`, again each time."""
        with self.alone():
            self.refuse_ended()
            if self.optimizer is not None:
                self.optimizer.settle()
            self.begin("evaluate", batch=True)
            engine, rows = self.admit(partial(self.evaluation_batch, args, kwargs))
            trained = self.losses
            with torch.no_grad(), torch.autocast(engine.pipe.device.type, enabled=False):
                loss = self.run(engine, rows)
            self.losses = trained
            return loss

    def evaluation_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        self.check_model(evaluation=True)
        count = self.engine.pipe.signature.microbatches_in(args, kwargs)
        engine = self.engine_for(args, kwargs, count or self.microbatches, evaluation=True)
        return with_data(engine, engine.pipe.signature.split(args, kwargs, engine.pipe.reduction.microbatches))

    def admit(self, take: Callable[[], Batch]) -> Batch:
        """The engine and microbatches of a call, once all ranks and replicas have one like it."""
        self.refuse_ended()
        return take()

    def close(self) -> None:
        """End the step: no call runs after it."""
        with self.alone():
            if self.fault is None:
                if self.optimizer is not None:
                    self.optimizer.settle()
                self.let_go()
                self.fault = CLOSED

    @abstractmethod
    def let_go(self) -> None:
        """Let go of what the step holds besides the model: connections, captured graphs."""

    def refuse_ended(self) -> None:
        """Raises `ZbfxError` if no step can run any more."""
        if self.fault == CLOSED:
            raise ZbfxError(f"{CLOSED}; bind the pipeline again to go on")
        if self.fault is not None:
            raise PipelineFault(
                f"this pipeline has failed before and cannot go on; bind it again. It failed with: {self.fault}"
            )

    def engine_for(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int, *, evaluation: bool
    ) -> Engine:
        """The engine for a batch like this; builds it if the options allow. Raises `InputError` otherwise."""
        signature = self.engine.pipe.signature
        tensors = signature.flatten(args, kwargs)
        self.given({spec.name: tuple(t.shape) for spec, t in zip(signature.tensors, tensors, strict=True)})
        fits = signature.microbatches_in(args, kwargs) == microbatches
        if fits and not evaluation:
            return self.engine
        if not fits and self.options.on_new_shape == "refuse":
            signature.split(args, kwargs, microbatches)
        key = (evaluation, microbatches, *(tuple(tensor.shape) for tensor in tensors))
        if key not in self.others:
            example = signature.first_microbatch(args, kwargs, microbatches)
            pipe = self.variants.of(*example, microbatches, evaluation=evaluation)
            self.others[key] = self.build(pipe if evaluation else self.validated(pipe))
            self.others[key].scale = self.engine.scale
            self.watch.check_tensors(self.tensor_names())  # it may read others, which changed before
        return self.others[key]

    def attach(self, optimizer: PostValidated) -> None:
        """Run from now on with `optimizer`, whose steps are validated while the next step warms up."""
        if self.options.on_nonfinite != "keep":
            raise ZbfxError(
                f"on_nonfinite={self.options.on_nonfinite!r} checks at the end of every step, which is a barrier; the "
                f"optimizer checks too: leave it out, and give the optimizer check_finite=True"
            )
        if self.optimizer is not None:
            raise ZbfxError("this step has an optimizer; bind the pipeline again for another one")
        before, self.optimizer = self.engine, optimizer
        pipe = self.validated(before.pipe)
        if pipe is not before.pipe:
            self.engine = self.build(pipe)
            for old, new in zip(before.runners, self.engine.runners, strict=True):
                new.continue_from(old)
        # What is watched from now on is neither loaded nor captured; a graph would live as long as its engine's cycles.
        before.captured, before.runs = None, 0
        self.others.clear()

    def validated(self, pipe: Pipeline) -> Pipeline:
        """The pipeline with the programs that the optimizer needs."""
        if self.optimizer is None or self.optimizer.sync:
            return pipe
        return pipe.validated(self.optimizer.layout.chain, self.optimizer.layout.size)

    @abstractmethod
    def begin(self, call: str, *, batch: bool = False) -> None:
        """A call that every rank makes begins; `batch`: it will be said what it is given."""

    @abstractmethod
    def agreed(self, call: str, work: Callable[[], T], arguments: Mapping[str, object]) -> T:
        """Begin a call, and do `work` on every rank; what one refuses, all refuse, as they do arguments that differ."""

    @abstractmethod
    def given(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """The shapes of the call's batch, by name."""

    @abstractmethod
    def guarded(self, work: Callable[[], T]) -> T:
        """Do what other ranks wait for; if it fails, they hear of it."""

    def drop(self) -> None:
        """Forget what is on its way, after a failure: messages that wait keep connections open."""
        runners = [runner for engine in (self.engine, *self.others.values()) for runner in engine.runners]
        for runner in runners + (self.optimizer.runners if self.optimizer else []):
            runner.transport.drop()

    @abstractmethod
    def transports(self, programs: Sequence[Program], pairs: Collection[tuple[int, int]]) -> list[Transport]:
        """How further programs of this process's ranks exchange their messages, which go between these `pairs`."""

    def whole_norms(self, norms: Tensor) -> Tensor:
        """The norms of what an optimizer steps here, where each replica steps a part of it."""
        return norms

    @abstractmethod
    def add_up(self, state: Tensor) -> None:
        """Overwrite `state` with its sum over all processes."""

    @abstractmethod
    def everywhere(self, value: Any) -> list[Any]:
        """The picklable value of every process."""

    def seed_of_step(self) -> int:
        return rng.mix(self.options.seed, self.count)

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The pipeline that was compiled, and those made since for other shapes and for evaluation."""
        return (self.engine.pipe, *(engine.pipe for engine in self.others.values()))

    @abstractmethod
    def plan(self, find: Callable[[Any], Schedule]) -> Schedule:
        """The schedule that `find` gives for what was asked of compile, the same on every rank."""

    @abstractmethod
    def build(self, pipe: Pipeline) -> Engine:
        """Bind a further pipeline of the same model, with the same parameters."""

    @abstractmethod
    def run(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        """Run the engine's programs on the microbatches; the loss of the batch."""

    @abstractmethod
    def problems(self, engine: Engine) -> list[str]:
        """What is not finite on any rank after a step."""


def with_data(engine: Engine, rows: Sequence[Sequence[Tensor]]) -> Batch:
    """A batch, if the tensors that this process reads have data: others may be on the meta device."""
    read = {name for runner in engine.runners for name in runner.input_names}
    for row in rows:
        for spec, tensor in zip(engine.pipe.signature.tensors, row, strict=True):
            if tensor.is_meta and spec.name in read:
                raise InputError(f"{spec.name}: expected a tensor with data, found one on the meta device")
    return engine, rows
