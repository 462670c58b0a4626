"""What an optimizer steps, under names that all ranks share: the parameters of the model, or with ZeRO-1 shards.

In: a step. Out: `Trained`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zbfx.compiled import Compiled
from zbfx.program.messages import parameter_holders
from zbfx.runtime.step import Step


@dataclass(frozen=True)
class Trained:
    """By name: the tensors (on the meta device where another rank has them), the ranks that hold each, and the stages
    that its gradient comes from."""

    parameters: Mapping[str, Tensor]
    holders: Mapping[str, Sequence[int]]
    stages: Mapping[str, set[int]]

    @classmethod
    def of(cls, step: Step) -> Trained:
        pipe = step.engine.pipe
        stages: dict[str, set[int]] = {}
        for stage in pipe.stages:
            for phase in stage.phases.values():
                for name in phase.gradients:
                    stages.setdefault(name, set()).add(stage.index)
        if step.engine.shards is not None:
            return cls.of_shards(step, pipe, stages)
        holders = parameter_holders(pipe.stages, pipe.placement)
        return cls(step.tensors.named, holders, stages)

    @classmethod
    def of_shards(cls, step: Step, pipe: Compiled, stages: Mapping[str, set[int]]) -> Trained:
        runner = step.engine.runners[0]
        assert runner.shards is not None, "of shards"
        parameters: dict[str, Tensor] = {}
        holders: dict[str, list[int]] = {}
        sources: dict[str, set[int]] = {}
        for rank, reductions in enumerate(pipe.reductions):
            for bucket in reductions.shards:
                name = bucket.key if bucket.shared else f"{bucket.key} of rank {rank}"
                holders.setdefault(name, []).append(rank)
                sources[name] = set().union(*(stages[parameter] for parameter in bucket.names))
                size = -(-bucket.size // runner.shards.replicas)
                parameters.setdefault(name, torch.empty(size, dtype=bucket.dtype, device="meta"))
                if rank == runner.rank:
                    parameters[name] = runner.shards.parameters[bucket.key]
        return cls(parameters, holders, sources)
