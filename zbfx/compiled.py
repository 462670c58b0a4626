"""What `compile` makes of a model: data alone. What runs it (`zbfx.runtime`) needs nothing else but the tensors.

Traced      what the trace has found
Compiled    a pipeline whose microbatches have one shape
Form        a further shape: its graph, its stages and what they cost
Mixed       a pipeline for one step, whose microbatches have forms of their own
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from zbfx.errors import ZbfxError, listed
from zbfx.graphs import Forms, Joint, Phase, Stage
from zbfx.memo import Memo
from zbfx.memory.lifetimes import lifetimes
from zbfx.memory.predict import RankMemory, Rows, predict, rank_memory
from zbfx.options import Options
from zbfx.passes.recompute import Level
from zbfx.passes.seal import has_asserts
from zbfx.plan import CostTable, Kind
from zbfx.program.calls import Readers
from zbfx.program.chain import Chain, chain_of, loss_phase, loss_rank, summary_of
from zbfx.program.codegen import Program, Whole, generate, rank_program
from zbfx.program.messages import (
    SharedGradient,
    messages_among,
    messages_of,
    parameter_holders,
    sent_values,
    shared_gradients,
)
from zbfx.program.reductions import RankReductions
from zbfx.schedule.schedule import Schedule
from zbfx.trace.loss import Reduction
from zbfx.trace.signature import Signature, TensorSpec


@dataclass(frozen=True, eq=False)
class Traced:
    """A microbatch's graph, as it was traced and with canonical operations, and what else the trace has found."""

    raw: Joint
    joint: Joint
    signature: Signature
    examples: tuple[Tensor, ...]
    reduction: Reduction


@dataclass(frozen=True, repr=False, eq=False)
class Compiled:
    """A pipeline for one shape of microbatch, to train or to evaluate. Programs follow from the other fields."""

    options: Options
    signature: Signature
    examples: tuple[Tensor, ...]  # the tensors of the example microbatch
    reduction: Reduction
    joint: Joint
    stages: tuple[Stage, ...]
    schedule: Schedule
    levels: tuple[Level, ...] = ()  # of recomputation, of each stage; (): none
    reductions: tuple[RankReductions, ...] = ()  # per rank, what is summed over replicas; (): there is one
    chain: Chain | None = None  # of optimizer steps without a barrier
    exposed_s: float = 0.0  # how much longer the iteration time is for sums over replicas, as planned

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        return generate(self.stages, self.schedule, self.reductions, self.chain, self.joint.metrics)

    @cached_property
    def checks_values(self) -> bool:
        """Whether the model checks values as it runs."""
        return any(has_asserts(phase.module.graph) for stage in self.stages for phase in stage.phases.values())

    def program(self, rank: int) -> Program:
        return self.programs[rank]

    @property
    def order(self) -> Sequence[int]:
        """The row of the batch that each microbatch of the programs is."""
        return range(self.reduction.microbatches)

    def specs(self, row: int) -> tuple[TensorSpec, ...]:
        """The tensors of a row of the batch."""
        return self.signature.tensors

    def stage_of(self, phase: Phase) -> Stage:
        return self.stages[phase.stage]

    def tokens(self, rows: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        """The count of a batch, as in `Reduction.tokens`."""
        return self.reduction.tokens(rows)

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """What each rank holds in a step, at every action, by storages (`zbfx.memory`)."""
        return predict(self.programs, self.joint, self.signature, self.options, Memo())

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards; else it evaluates."""
        return any(action.kind is not Kind.F for order in self.schedule.ranks for action in order)

    @property
    def has_prologues(self) -> bool:
        """Whether a stage keeps values that it makes once a step."""
        return any(stage.kept for stage in self.stages)

    @property
    def device(self) -> torch.device:
        return self.options.device

    @property
    def placement(self) -> tuple[int, ...]:
        return self.schedule.costs.placement

    @property
    def loss_rank(self) -> int:
        return loss_rank(self.stages, self.placement)

    @property
    def shared_gradients(self) -> tuple[SharedGradient, ...]:
        return shared_gradients(self.stages, self.placement)

    @property
    def message_pairs(self) -> set[tuple[int, int]]:
        """The (source, target) ranks between which anything travels."""
        return {(m.source, m.target) for program in self.programs for m in program.messages.values()}

    def described(self, schedule: Schedule) -> Compiled:
        """This pipeline with more said of its schedule, such as notes; orders, and so programs, are the same."""
        assert (schedule.ranks, schedule.beside) == (self.schedule.ranks, self.schedule.beside), "another order"
        found = replace(self, schedule=schedule)
        vars(found)["programs"] = self.programs
        return found

    def validated(self, ranks: tuple[int, ...], state_size: int) -> Compiled:
        """This pipeline for optimizer steps without a barrier; `ranks` as in `Chain`."""
        messages = messages_of(self.stages, self.schedule)
        summary = summary_of(self.stages, self.joint.metrics)
        return replace(self, chain=chain_of(self.schedule, messages, ranks, summary, state_size))

    def sharded(self) -> Compiled:
        """A replicated pipeline with ZeRO-1: programs begin by collecting the parameters from the replicas."""
        return replace(self, reductions=tuple(found.sharded() for found in self.reductions))


@dataclass(frozen=True, eq=False)
class Form:
    """The stages of a pipeline for one shape of microbatch, and what they cost."""

    signature: Signature
    joint: Joint
    stages: tuple[Stage, ...]
    costs: CostTable

    @cached_property
    def readers(self) -> Readers:
        return Readers.of(self.stages)


def refuse_other_ways(pipe: Compiled, stages: Sequence[Stage], trains: bool) -> None:
    """Raises `ZbfxError` unless microbatches of these stages can share a step with those of the pipeline: losses and
    gradients arise on the same stages, and values go between the same ranks."""
    placement = pipe.placement
    first = loss_phase(pipe.stages).stage, parameter_holders(pipe.stages, placement), written_to(pipe.stages)
    found = loss_phase(stages).stage, parameter_holders(stages, placement), written_to(stages)
    names = "where the loss arises", "which ranks read a parameter", "which stages give a gradient or write a buffer"
    different = [name for name, one, other in zip(names, first, found, strict=True) if trains and one != other]
    if not pairs_between(stages, placement) <= pairs_between(pipe.stages, placement):
        different.append("between which ranks values go")
    if different:
        raise ZbfxError(
            f"microbatches of this shape take another way through the model than the example: other is "
            f"{listed(different)}. Run them in steps of their own, with on_new_shape='recompile' and step(...)"
        )


def written_to(stages: Sequence[Stage]) -> list[tuple[str, set[str], set[str]]]:
    """By phase, the parameters that get a gradient and the buffers that are written."""
    return [
        (phase.name, set(phase.gradients), set(phase.updates)) for stage in stages for phase in stage.phases.values()
    ]


def pairs_between(stages: Sequence[Stage], placement: Sequence[int]) -> set[tuple[int, int]]:
    """The (source, target) ranks between which values of a microbatch travel."""
    return {
        (placement[source], placement[values.target])
        for (source, _), sent in sent_values(stages, placement).items()
        for values in sent
    }


@dataclass(frozen=True, repr=False, eq=False)
class Mixed(Compiled):
    """A pipeline for one step, whose microbatches have forms of their own. The fields of `Compiled` that tell of one
    shape are those of the first form. Programs are made when they are asked for, one rank's without the others."""

    members: tuple[Form, ...] = ()
    of: tuple[int, ...] = ()  # by row of the batch, its place among the members
    order: tuple[int, ...] = ()  # by microbatch of the programs, its row

    @cached_property
    def forms(self) -> Forms:
        return Forms(tuple(form.stages for form in self.members), tuple(self.of[row] for row in self.order))

    @cached_property
    def whole(self) -> Whole:
        assert self.chain is not None, "planned with the step"
        messages = messages_among(self.forms, self.schedule)
        return Whole.of(self.forms, self.schedule, messages, self.chain, [form.readers for form in self.members])

    @cached_property
    def order_hash(self) -> int:
        """Equal where the orders of all ranks are."""
        return zlib.crc32(repr((self.order, self.schedule.ranks)).encode())

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        return tuple(map(self.program, range(len(self.schedule.ranks))))

    def program(self, rank: int) -> Program:
        return rank_program(self.whole, rank, self.reductions[rank] if self.reductions else None)

    @property
    def rows(self) -> list[Rows]:
        """How many microbatches there are of each form."""
        return [Rows(form.joint, form.signature, self.of.count(k)) for k, form in enumerate(self.members)]

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        memo = Memo()
        return tuple(
            rank_memory(one, self.rows, self.options, lambda *phase: memo(lifetimes, *phase)) for one in self.programs
        )

    def stage_of(self, phase: Phase) -> Stage:
        own = (form.stages[phase.stage] for form in self.members)
        return next(stage for stage in own if stage.phases.get(phase.kind) is phase)

    def specs(self, row: int) -> tuple[TensorSpec, ...]:
        return self.members[self.of[row]].signature.tensors

    def tokens(self, rows: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
        if self.reduction.count is None:
            return None
        counts = [self.members[of].joint.count for of in self.of]
        found = [count(row).double() for count, row in zip(counts, rows, strict=True) if count is not None]
        return torch.stack(found).sum(0)

    def chained(self, ranks: tuple[int, ...], state_size: int | None) -> Mixed:
        """This pipeline with a chain of these ranks, as in `chain_of`."""
        messages = messages_among(self.forms, self.schedule) if state_size is not None else ()
        summary = summary_of(self.stages, self.joint.metrics)
        return replace(self, chain=chain_of(self.schedule, messages, ranks, summary, state_size))
