"""Steps whose microbatches are unlike: from their shapes to an engine that runs them.

In: the microbatches of a call. Out: the engine and rows of a batch. On the way each microbatch gets the stages of its
shape, a plan orders them, ranks and replicas tell each other in one exchange what they are about to run, and each rank
makes its own program. Forms of shapes, and engines of whole steps, are kept while they are used.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from zbfx.compiled import Compiled, Form, Mixed
from zbfx.errors import InputError, ZbfxError
from zbfx.graphs import Phase
from zbfx.memory.lifetimes import Lifetimes, lifetimes
from zbfx.memory.predict import rank_memory
from zbfx.modes import uncollected
from zbfx.program.boxed import Boxed
from zbfx.runtime.engine import Batch, Engine
from zbfx.runtime.ranks import Ranks
from zbfx.schedule.unlike import (
    Unlike,
    UnlikePlan,
    activation_limits,
    limits_of_multiple,
    plan_one_by_one,
    plan_unlike,
)
from zbfx.trace.loss import Reduction
from zbfx.trace.signature import Signature
from zbfx.trace.wanted import Request

FORMS_KEPT, ENGINES_KEPT = 64, 16
REPLANS = 4  # of planning for less memory, before microbatches run one after the other

OneCall = tuple[Sequence[Any], Mapping[str, Any]]  # positional and keyword arguments of a microbatch
RowShapes = tuple[tuple[int, ...], ...]  # of a microbatch's tensors
RecentKey = TypeVar("RecentKey")
RecentValue = TypeVar("RecentValue")


class Recent(Generic[RecentKey, RecentValue]):
    """The values that were asked for last, so many of them, by key."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: OrderedDict[RecentKey, RecentValue] = OrderedDict()
        self.hits = self.misses = 0

    def get(self, key: RecentKey, make: Callable[[], RecentValue]) -> RecentValue:
        if key in self.kept:
            self.hits += 1
            self.kept.move_to_end(key)
            return self.kept[key]
        self.misses += 1
        found = self.kept[key] = make()
        if len(self.kept) > self.most:
            self.kept.popitem(last=False)
        return found


@dataclass(eq=False)
class Served:
    """A form, and, by identity of its phases, what they run as and how long their values live. `is_loaded`: all of its
    code has run on this device."""

    form: Form
    is_loaded: bool = False
    runs: dict[int, Boxed] = field(default_factory=dict)
    lives: dict[int, Lifetimes] = field(default_factory=dict)

    @cached_property
    def phases(self) -> set[int]:
        return {id(phase) for stage in self.form.stages for phase in stage.phases.values()}

    def lifetimes(self, phase: Phase, granule: int) -> Lifetimes:
        if id(phase) not in self.lives:
            self.lives[id(phase)] = lifetimes(phase, granule)
        return self.lives[id(phase)]

    def run(self, phase: Phase, compiler: Callable[[Phase], Boxed]) -> Boxed:
        if id(phase) not in self.runs:
            self.runs[id(phase)] = compiler(phase)
        return self.runs[id(phase)]


@dataclass(frozen=True)
class Proposal:
    """What a rank tells all others before a step. `shapes` and `orders` are hashes; `excess`, by rank, are the bytes by
    which its program would exceed the limit; `refusal` is why this rank cannot run its batch. `alike`: nothing is
    planned yet, as the pipeline that was compiled runs such batches."""

    microbatches: int
    shapes: int
    orders: int = 0
    excess: Mapping[int, float] = field(default_factory=dict)
    refusal: str | None = None
    alike: bool = False


class MakesForm(Protocol):
    """Makes the stages of a shape (`zbfx.variants`)."""

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any], request: Request) -> Form: ...


class Mixing:
    """Makes the engines of unlike steps."""

    def __init__(
        self,
        first: Callable[[], Engine],
        ranks: Ranks,
        form: MakesForm,
        compiler: Callable[[Phase], Boxed],
        prepare: Callable[[Engine], None],
    ) -> None:
        """`first` gives the engine of the shapes that were compiled for; `prepare` gets every engine that is made."""
        self.first, self.ranks, self.form = first, ranks, form
        self.compiler, self.prepare = compiler, prepare
        self.forms: Recent[tuple[Request, RowShapes], Served] = Recent(FORMS_KEPT)
        self.engines: Recent[tuple[Any, ...], Engine] = Recent(ENGINES_KEPT)
        self.chain: tuple[tuple[int, ...], int] | None = None

    @property
    def pipe(self) -> Compiled:
        return self.first().pipe

    def plan_ahead(self, calls: Sequence[OneCall], request: Request) -> None:
        """Make the engine that `batch` will look for first."""
        rows = [row_of(request.signature, *call) for call in calls]
        if not self.is_alike(rows, request):
            served = [self.served(call, row, request) for call, row in zip(calls, rows, strict=True)]
            self.proposed(served, rows, request, self.limits(request), one_by_one=False)

    def batch(self, calls: Sequence[OneCall], request: Request) -> Batch:
        """The engine of a step of these microbatches, once all ranks agree on it. Raises `InputError` on all ranks
        where one refuses its batch."""
        engine: Engine | None = None
        rows: list[list[Tensor]] = []
        served: list[Served] = []
        refusal: ZbfxError | None = None
        limits = self.limits(request)
        try:
            rows = [row_of(request.signature, *call) for call in calls]
            served = [self.served(call, row, request) for call, row in zip(calls, rows, strict=True)]
        except ZbfxError as error:
            refusal = error
        alike, turn = self.is_alike(rows, request), 0
        while True:
            try:
                own = Proposal(len(calls), shapes_hash(rows), alike=alike)
                if refusal is None and not alike:
                    engine, own = self.proposed(served, rows, request, limits, one_by_one=turn >= REPLANS)
            except InputError as error:
                refusal = error
            everywhere = self.ranks.before_step(own if refusal is None else replace(own, refusal=str(refusal)))
            counts = self.agreed(everywhere, refusal)
            if all(found.alike for found in everywhere):
                engine = self.first()
                break
            excess = most_by_rank([found.excess for found in everywhere])
            if excess and turn >= REPLANS:
                rank, size = max(excess.items(), key=lambda pair: pair[1])
                raise InputError(
                    f"no order of these microbatches stays within mem_limit: one after the other, they still exceed it "
                    f"on rank {rank} by {size:,.0f} bytes. Give shorter microbatches, or compile with a higher limit"
                )
            if not excess and not any(found.alike for found in everywhere):
                break
            if excess:
                assert limits is not None, "exceeded"
                limits = tuple(most - excess.get(rank, 0.0) for rank, most in enumerate(limits))
            alike, turn = False, turn + bool(excess)
        assert engine is not None, "refused above"
        self.ranks.given({"microbatches of replicas": counts})
        engine.counts = counts
        if isinstance(engine.pipe, Mixed):
            engine.runs += int(engine.runs == 0 and all(one.is_loaded for one in served))
            for one in served:
                one.is_loaded = True
        return engine.with_data(rows)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """What this rank refuses in the block, before `batch`, all others hear in the exchange of theirs."""
        try:
            yield
        except InputError as error:
            self.ranks.before_step(Proposal(0, 0, refusal=str(error)))
            raise

    def is_alike(self, rows: Sequence[Sequence[Tensor]], request: Request) -> bool:
        """Whether the pipeline that was compiled runs this batch as it is."""
        shapes = [tuple(tensor.shape) for tensor in self.pipe.examples]
        like = all([tuple(tensor.shape) for tensor in row] == shapes for row in rows)
        return like and request.wanted.trains and len(rows) == self.pipe.reduction.microbatches

    def served(self, call: OneCall, row: Sequence[Tensor], request: Request) -> Served:
        key = request, tuple(tuple(tensor.shape) for tensor in row)
        return self.forms.get(key, lambda: Served(self.form(*call, request)))

    def agreed(self, everywhere: Sequence[Proposal], refusal: ZbfxError | None) -> tuple[int, ...]:
        """The numbers of microbatches of the replicas. Raises, on all ranks alike, where a rank refuses, or ranks
        of one pipeline propose different steps."""
        if refusal is not None:
            raise refusal
        names, count = self.ranks.names(), len(everywhere) // self.ranks.replicas
        for name, found in zip(names, everywhere, strict=True):
            if found.refusal is not None:
                raise InputError(f"{name} refused its batch: {found.refusal}")
        for start in range(0, len(everywhere), count):
            first = everywhere[start]
            for k in range(start + 1, start + count):
                other = everywhere[k]
                if (other.microbatches, other.shapes) != (first.microbatches, first.shapes):
                    raise InputError(
                        f"all ranks of a pipeline take the same microbatches; found {first.microbatches} on "
                        f"{names[start]}, and {other.microbatches}, or others in shape, on {names[k]}"
                    )
                if other.orders != first.orders:
                    raise InputError(
                        f"{names[k]} has planned another order than {names[start]} for the same microbatches: their "
                        f"estimates differ. Run one version of torch and of Python on all ranks"
                    )
        return tuple(everywhere[start].microbatches for start in range(0, len(everywhere), count))

    def proposed(
        self,
        served: Sequence[Served],
        rows: Sequence[Sequence[Tensor]],
        request: Request,
        limits: tuple[float, ...] | None,
        *,
        one_by_one: bool,
    ) -> tuple[Engine, Proposal]:
        key = request, tuple(served), limits, one_by_one  # which keeps the forms: ids of others could be theirs
        engine = self.engines.get(key, lambda: self.built(served, request, limits, one_by_one))
        assert isinstance(engine.pipe, Mixed), "made here"
        most = self.limits(request)
        excess = {} if most is None else {rank: held - most[rank] for rank, held in engine.held_bytes.items()}
        return engine, Proposal(len(rows), shapes_hash(rows), engine.pipe.order_hash, excess)

    @uncollected()
    def built(
        self, served: Sequence[Served], request: Request, limits: tuple[float, ...] | None, one_by_one: bool
    ) -> Engine:
        """Plan a step, and make the programs of this process's ranks."""
        distinct = list({id(one): one for one in served}.values())
        place = {id(one): k for k, one in enumerate(distinct)}
        of = tuple(place[id(one)] for one in served)
        plan = self.plan(served, request, limits, one_by_one)
        mixed = self.mixed([one.form for one in distinct], of, plan, request)
        first = self.first()
        tensors = first.runners[0].tensors.among([(one.form.joint, one.form.stages) for one in distinct])
        engine = self.ranks.running(mixed, tensors)
        served_by = {phase: one for one in distinct for phase in one.phases}
        engine.run_phases_by(lambda phase: served_by[id(phase)].run(phase, self.compiler))
        self.prepare(engine)
        for runner in engine.runners:
            runner.pace = None  # its actions are unlike
        engine.share(first)
        if self.pipe.options.limits_bytes and request.wanted.trains:
            lives = lambda phase, granule: served_by[id(phase)].lifetimes(phase, granule)  # noqa: E731
            found = [rank_memory(runner.program, mixed.rows, self.pipe.options, lives) for runner in engine.runners]
            engine.held_bytes = {memory.rank: memory.peak_bytes for memory in found}
        return engine

    def plan(
        self, served: Sequence[Served], request: Request, limits: tuple[float, ...] | None, one_by_one: bool
    ) -> UnlikePlan:
        tables, multiple = tuple(one.form.costs for one in served), self.pipe.options.multiple
        by_multiple = multiple is not None and request.wanted.trains
        problem = Unlike(
            tables, limits_of_multiple(tables, multiple or 0.0) if by_multiple else activation_limits(tables, limits)
        )
        written = {name for stage in served[0].form.stages for p in stage.phases.values() for name in p.updates}
        if one_by_one:
            return plan_one_by_one(problem)
        found = plan_unlike(problem, trains=request.wanted.trains, keep_order=bool(written))
        return plan_one_by_one(problem) if found is None else found

    def mixed(self, members: Sequence[Form], of: tuple[int, ...], plan: UnlikePlan, request: Request) -> Mixed:
        pipe, first = self.pipe, members[0]
        trains = request.wanted.trains
        reductions = tuple(found.whole() if trains else found.forward() for found in pipe.reductions)
        made = Mixed(
            pipe.options,
            first.signature,
            (),
            Reduction.of(first.joint, pipe.reduction.name, len(of)),
            first.joint,
            first.stages,
            plan.schedule,
            reductions=reductions,
            members=tuple(members),
            of=of,
            order=plan.order,
        )
        ranks, state_size = self.first().runners[0].program.chain.chain.ranks, None
        if self.chain is not None and trains:
            ranks, state_size = self.chain
        return made.chained(ranks, state_size)

    def limits(self, request: Request) -> tuple[float, ...] | None:
        """Bytes that ranks may hold in all; None where `mem_limit` is a multiple, of what other microbatches need."""
        found = self.pipe.schedule.mem_limit if self.pipe.options.limits_bytes else None
        return None if found is None or not request.wanted.trains else tuple(map(float, found))


def row_of(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of a microbatch of any shapes. Raises `InputError` for what no step takes."""
    signature.refuse_gradients(args, kwargs)
    tensors = signature.flatten(args, kwargs)
    for spec, tensor in zip(signature.tensors, tensors, strict=True):
        if tensor.dtype != spec.dtype:
            raise InputError(
                f"{spec.name}: expected dtype {spec.dtype} as in the example microbatch, found {tensor.dtype}"
            )
        if tensor.grad_fn is not None:
            raise InputError(
                f"{spec.name} is the result of other modules or operators, to which no gradient would flow "
                f"({tensor.grad_fn.name()}): make them part of the model, or pass {spec.name}.detach()"
            )
    return tensors


def most_by_rank(excesses: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The largest excess of a rank over all replicas, where there is one."""
    ranks = {rank for found in excesses for rank, size in found.items() if size > 0}
    return {rank: max(found.get(rank, 0.0) for found in excesses) for rank in sorted(ranks)}


def shapes_hash(rows: Sequence[Sequence[Tensor]]) -> int:
    return zlib.crc32(repr([[tuple(tensor.shape) for tensor in row] for row in rows]).encode())
