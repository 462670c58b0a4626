"""Which engine runs a batch: that of the shapes that were compiled for, or one of others, or of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from zbfx.arguments import kind_of
from zbfx.compiled import Compiled, Form
from zbfx.errors import InputError
from zbfx.graphs import Phase
from zbfx.program.boxed import Boxed, boxed
from zbfx.runtime.captured import Launched
from zbfx.runtime.delivery import Delivery
from zbfx.runtime.engine import Batch, Engine
from zbfx.runtime.mixing import Mixing
from zbfx.runtime.options import StepOptions
from zbfx.runtime.pace import ActionKind
from zbfx.runtime.ranks import Ranks
from zbfx.trace.signature import is_pair
from zbfx.trace.wanted import EVALUATION, TRAINING, Request, Wanted

SplitPair = tuple[tuple[Any, ...], Mapping[str, Any]]
PAIRS = "a list of (positional arguments, keyword arguments), like ((inputs, targets), {}), one for each microbatch"


class MakesFurther(Protocol):
    """Makes what was not compiled for (`zbfx.variants`)."""

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int, request: Request) -> Compiled:
        """The pipeline for a microbatch of other shapes, or for another request."""

    def form(self, args: Sequence[Any], kwargs: Mapping[str, Any], request: Request) -> Form:
        """The stages of such a microbatch, for steps whose microbatches are unlike."""

    def reordered(self, pipe: Compiled, seconds: Mapping[ActionKind, float]) -> Compiled:
        """The pipeline of the same stages in the order that is fastest for measured seconds."""


class Engines:
    """The engines of one model. `first` is that of the shapes that were compiled for; others are built as batches ask
    for them, with the same parameters and the same tensors for gradients."""

    def __init__(
        self,
        first: Engine,
        options: StepOptions,
        ranks: Ranks,
        launch: Launched,
        variants: MakesFurther,
        check: Callable[[Collection[str]], None],
        compiler: Callable[[Phase], Boxed] = boxed,
    ) -> None:
        """`check` looks at the tensors of these names, which an engine that was built may be the first to read."""
        self.first, self.options, self.ranks, self.launch = first, options, ranks, launch
        self.variants, self.check, self.compiler = variants, check, compiler
        self.buckets, self.padding_is_compared = options.buckets, False
        self.requests = [Request(wanted, first.pipe.signature) for wanted in (TRAINING, EVALUATION)]
        self.others: dict[tuple[object, ...], Engine] = {}
        self.chain: tuple[tuple[int, ...], int] | None = None
        self.mixing = Mixing(lambda: self.first, ranks, variants.form, compiler, launch.prepare)
        launch.prepare(first)

    def __iter__(self) -> Iterator[Engine]:
        return iter((self.first, *self.others.values(), *self.mixing.engines.kept.values()))

    @property
    def tensor_names(self) -> set[str]:
        """The parameters and buffers that this process reads."""
        return {name for engine in self for name in engine.tensor_names}

    def batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        count = self.first.pipe.reduction.microbatches
        self.first.pipe.signature.refuse_gradients(args, kwargs)
        engine = self.engine_for(args, kwargs, count, self.requests[0])
        return engine.with_data(engine.pipe.signature.split(args, kwargs, count))

    def split_batch(self, batches: Sequence[SplitPair], call: str) -> Batch:
        """The engine and the microbatches of a training step whose batch is cut already. Where further shapes are
        allowed, microbatches may be unlike, and any number of them."""
        if not self.options.refuses_shapes:
            with self.mixing.refusing():
                refuse_no_pairs(batches, call)
                batches = self.rounded(batches)
            return self.mixed(batches, self.requests[0])
        refuse_no_pairs(batches, call)
        signature, count = self.first.pipe.signature, self.first.pipe.reduction.microbatches
        if len(batches) != count:
            raise InputError(
                f"run_split takes a pair for each microbatch: expected {count} microbatches, found {len(batches)}. "
                f"Others, of any number and shapes, run with on_new_shape='symbolic' or 'recompile'"
            )
        for args, kwargs in batches:
            signature.refuse_gradients(args, kwargs)
        self.ranks.given(signature.batch_shapes(count))
        return self.first.with_data([signature.split(args, kwargs, 1)[0] for args, kwargs in batches])

    def rounded(self, batches: Sequence[SplitPair]) -> list[SplitPair]:
        """Microbatches as long as their buckets, if there are any."""
        if self.buckets is None:
            return list(batches)
        return [self.buckets.padded(self.first.pipe.signature, pair, self.compiles) for pair in batches]

    def plan_ahead(self, batches: Sequence[SplitPair]) -> None:
        """Plan a training step of unlike microbatches, and make its engine."""
        refuse_no_pairs(batches, "plan_split")
        if not self.options.refuses_shapes:
            self.mixing.plan_ahead(self.rounded(batches), self.requests[0])

    @property
    def compiles(self) -> bool:
        return self.first.pipe.options.runs.compiles

    @property
    def awaits_padding(self) -> bool:
        """Whether a step may pad microbatches, and none that was padded has been compared: on all ranks, or on none."""
        return self.buckets is not None and self.buckets.may_pad(self.compiles) and not self.padding_is_compared

    def most_padded(self, batches: Sequence[SplitPair], call: str) -> tuple[int, SplitPair] | None:
        """By how much the microbatch grows that grows most, and this microbatch. None: taking the batch will fail."""
        assert self.buckets is not None, "asked before"
        try:
            refuse_no_pairs(batches, call)
            grown = [self.buckets.growth(self.first.pipe.signature, pair, self.compiles) for pair in batches]
        except Exception:  # also of the user's `rounded`; the other ranks hear of it from the call that takes the batch
            return None
        return max(grown), batches[grown.index(max(grown))]

    def evaluated_batch(self, batches: Sequence[SplitPair], call: str, *, as_they_are: bool = False) -> Batch:
        """As `split_batch`, to evaluate, for any number of microbatches. `as_they_are`: without padding."""
        signature = self.first.pipe.signature
        with self.mixing.refusing():
            refuse_no_pairs(batches, call)
            for args, kwargs in batches if self.options.refuses_shapes else ():
                signature.split(args, kwargs, 1)
            batches = batches if as_they_are else self.rounded(batches)
        return self.mixed(batches, self.requests[1])

    def mixed(self, batches: Sequence[SplitPair], request: Request) -> Batch:
        """The engine and the microbatches of a step of unlike microbatches."""
        misses = self.mixing.forms.misses
        batch = self.mixing.batch(batches, request)
        if self.mixing.forms.misses > misses:
            self.check(self.tensor_names)
        return batch

    def forward_batch(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Wanted, delivery: Delivery
    ) -> Batch:
        """The engine and the microbatches of a forward: the example's arguments, and for one that is asked for outputs
        alone, others too. Their number is what the batch has."""
        example, count = self.first.pipe.signature, self.first.pipe.reduction.microbatches
        if not wanted.has_loss and len(args) > example.input_count and not wanted.takes_targets:
            raise InputError(
                f"the example has {example.input_count} positional arguments of the model, and what follows them is "
                f"given to functions in outputs=; found {len(args)}, and no function. Pass others of the model by name"
            )
        request = Request(wanted, example if wanted.has_loss else example.of_call(args, kwargs, count))
        request = next((known for known in self.requests if known.is_like(request)), request)
        if request not in self.requests:
            self.requests.append(request)
        count = request.signature.microbatches_in(args, kwargs) or count
        engine = self.engine_for(args, kwargs, count, request)
        delivery.check(engine.pipe)
        return engine.with_data(engine.pipe.signature.split(args, kwargs, engine.pipe.reduction.microbatches))

    def engine_for(self, args: Sequence[Any], kwargs: Mapping[str, Any], microbatches: int, request: Request) -> Engine:
        """The engine for a batch like this; builds it if the options allow. Raises `InputError` otherwise."""
        signature, trains = request.signature, request.wanted.trains
        tensors = signature.flatten(args, kwargs)
        self.ranks.given({spec.name: tuple(t.shape) for spec, t in zip(signature.tensors, tensors, strict=True)})
        fits = signature.microbatches_in(args, kwargs) == microbatches
        if fits and trains:
            return self.first
        if not fits and self.options.refuses_shapes:
            signature.split(args, kwargs, microbatches)
        key = (request, microbatches, *(tuple(tensor.shape) for tensor in tensors))
        if key not in self.others:
            example = signature.first_microbatch(args, kwargs, microbatches)
            pipe = self.variants.of(*example, microbatches, request)
            self.others[key] = self.build(self.validated(pipe) if trains else pipe)
            self.check(self.tensor_names)
        return self.others[key]

    def build(self, pipe: Compiled) -> Engine:
        engine = self.ranks.engine(pipe, self.first.runners[0].tensors.of(pipe.joint))
        engine.run_phases_by(self.compiler)
        self.launch.prepare(engine)
        engine.share(self.first)
        return engine

    def validate(self, ranks: tuple[int, ...], state_size: int) -> None:
        """Run, from now on, programs for optimizer steps without a barrier (`zbfx.program.chain`)."""
        self.chain = self.mixing.chain = (ranks, state_size)
        self.replace_first(self.first.pipe)

    def replace_first(self, pipe: Compiled) -> None:
        """Run, from now on, a pipeline of the same stages for the shapes that were compiled for."""
        before, self.first = self.first, self.build(self.validated(pipe))
        self.first.run_phases_as(before)
        before.forget()

    def validated(self, pipe: Compiled) -> Compiled:
        return pipe if self.chain is None else pipe.validated(*self.chain)

    def restart(self) -> None:
        """Let go of what was captured and built before."""
        # What is watched from now on is neither loaded nor captured; a graph would live as long as its engine's cycles.
        self.first.forget()
        self.others.clear()
        self.mixing.engines.kept.clear()


def refuse_no_pairs(batches: Any, call: str) -> None:
    """Raises `InputError` for what is no list of the arguments of microbatches."""
    if not isinstance(batches, Sequence) or isinstance(batches, str):
        raise InputError(f"{call} takes {PAIRS}; found {kind_of(batches)}")
    for index, pair in enumerate(batches):
        if not is_pair(pair):
            raise InputError(f"{call} takes {PAIRS}; found {kind_of(pair)} for microbatch {index}")
    if not batches:
        raise InputError(f"{call} takes {PAIRS}; found an empty list")
