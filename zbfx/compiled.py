"""What `compile` makes of a model: data alone. What runs it (`zbfx.runtime`) needs nothing else but the tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from zbfx.graphs import Joint, Stage
from zbfx.memo import Memo
from zbfx.memory.predict import RankMemory, predict
from zbfx.options import Options
from zbfx.passes.recompute import Level
from zbfx.plan import Kind
from zbfx.program.chain import Chain, chain_of, loss_rank, summary_of
from zbfx.program.codegen import Program, generate
from zbfx.program.messages import SharedGradient, messages_of, shared_gradients
from zbfx.program.reductions import RankReductions
from zbfx.schedule.schedule import Schedule
from zbfx.trace.loss import Reduction
from zbfx.trace.signature import Signature


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
