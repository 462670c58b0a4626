"""`compile`: a model and its loss become a pipeline. Start reading here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbfx import comm, cost
from zbfx.batch import Signature
from zbfx.codegen import Program, generate
from zbfx.errors import ZbfxError
from zbfx.graphs import Joint, Stage
from zbfx.messages import shared_gradients
from zbfx.passes.canonicalize import canonicalize
from zbfx.passes.extract import extract
from zbfx.passes.partition import partition
from zbfx.passes.split import split
from zbfx.plan import CostTable, Schedule
from zbfx.run import RankRunner, Tensors
from zbfx.schedule import plan
from zbfx.step import LocalStep
from zbfx.trace import canonical_names, named_tensors, trace


def compile(
    model: nn.Module,
    *,
    stages: int,
    microbatches: int,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    example_targets: Any = (),
    loss_fn: Callable[..., Tensor] | None = None,
    schedule: Any = "auto",
    mem_limit: Any = None,
    costs: CostTable | str = "estimate",
    cuts: Sequence[str] | None = None,
    stages_per_rank: int | None = None,
    device: torch.device | str | None = None,
) -> Pipeline:
    """Compile `model` into a pipeline over `stages` ranks."""
    targets = example_targets if isinstance(example_targets, tuple) else (example_targets,)
    device = torch.device(device) if device is not None else device_of(model)
    hardware = cost.hardware_of(device)
    placement = placement_of(schedule, stages, stages_per_rank)
    node_s = partial(cost.node_s, hardware=hardware)

    raw, signature = trace(model, loss_fn, example_inputs, dict(example_kwargs or {}), targets, device=device)
    joint = canonicalize(raw)
    placed = partition(joint, len(placement), seconds=node_s, bytes_per_s=hardware.link_bytes_per_s, cuts=cuts)
    stage_graphs = extract(split(placed))
    table = costs if isinstance(costs, CostTable) else cost.estimate(stage_graphs, placement, hardware)
    best = plan(table, microbatches, schedule=schedule, mem_limit=mem_limit)
    programs = generate(stage_graphs, best)
    return Pipeline(model, loss_fn, signature, raw, stage_graphs, best, programs, device)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's tensors live; the CPU for a model on the meta device."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def placement_of(schedule: Any, ranks: int, stages_per_rank: int | None) -> tuple[int, ...]:
    """Stage -> rank: down and up again for the V schedules, looped for interleaved ones, one stage a rank otherwise."""
    if not isinstance(ranks, int) or ranks < 1:
        raise ZbfxError(f"stages is the number of ranks, an integer >= 1; found {ranks!r}")
    if isinstance(schedule, Schedule):
        return schedule.costs.placement
    if schedule in ("zb-v", "v-half", "v-min"):
        return (*range(ranks), *reversed(range(ranks)))
    if schedule == "interleaved-1f1b":
        return tuple(range(ranks)) * (stages_per_rank or 2)
    return tuple(range(ranks)) * (stages_per_rank or 1)


@dataclass(frozen=True)
class Pipeline:
    """A compiled pipeline: `schedule` prints as a grid, `programs[rank].code` is what a rank does."""

    model: nn.Module
    loss_fn: Callable[..., Tensor] | None
    signature: Signature
    joint: Joint
    stages: tuple[Stage, ...]
    schedule: Schedule
    programs: tuple[Program, ...]
    device: torch.device

    @property
    def loss_stage(self) -> int:
        return next(s.index for s in self.stages if any(phase.has_loss for phase in s.phases.values()))

    @property
    def loss_dtype(self) -> torch.dtype:
        from zbfx.graphs import Role

        return next(
            value.meta["val"].dtype
            for value, port in zip(self.joint.output_values, self.joint.outputs, strict=True)
            if port.role is Role.LOSS
        )

    def tensors(self) -> Tensors:
        """The model's live tensors by canonical name. Raises `ZbfxError` if one is still on the meta device."""
        canonical = canonical_names(self.model, self.loss_fn)
        named = named_tensors(self.model, self.loss_fn)
        return Tensors({name: named[name] for name in dict.fromkeys(canonical.values())}, self.joint.constants)

    def run_local(self, *, seed: int | None = None) -> LocalStep:
        """A step that runs every rank in this process, without torch.distributed."""
        tensors = self.tensors()
        mailbox: dict[str, tuple[Tensor, ...]] = {}
        shared = shared_gradients(self.stages, self.schedule.costs.placement)
        runners = [
            RankRunner(
                program,
                tensors,
                comm.LocalTransport(program.messages, mailbox),
                adds={gradient.name for gradient in shared if gradient.holders[0] == program.rank},
            )
            for program in self.programs
        ]
        return LocalStep(
            runners,
            self.loss_dtype,
            signature=self.signature,
            microbatches=self.schedule.microbatches,
            device=self.device,
            seed=torch.initial_seed() if seed is None else seed,
        )
