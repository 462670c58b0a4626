"""What of a model, and of its training, one process holds and gives to checkpoints. In: a model and an engine. Out:
names and pieces, which `zbfx.checkpoint` writes and reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from zbfx.checkpoint.names import Names, owning_ranks
from zbfx.checkpoint.optimizers import Optimized
from zbfx.checkpoint.parts import Piece
from zbfx.compiled import Compiled
from zbfx.errors import ZbfxError
from zbfx.runtime.engine import Engine
from zbfx.trace.guard import Source


@dataclass(frozen=True)
class Holding:
    """`optimized` are the parameters as optimizers have them, `used` the tensors of this process's stages. It is number
    `index` of the `processes` that save together, by replica and rank. `rank` None: all ranks are in it."""

    source: Source
    pipe: Compiled
    optimized: tuple[Optimized, ...]
    used: frozenset[str]
    rank: int | None
    replica: int
    index: int
    processes: int

    @classmethod
    def of(cls, source: Source, engine: Engine) -> Holding:
        place = None if engine.channels is None else engine.channels.place
        optimized, used = tuple(optimized_of(engine)), frozenset(engine.tensor_names)
        if place is None:
            return cls(source, engine.pipe, optimized, used, None, 0, 0, 1)
        if place.shard_count > 1:
            raise ZbfxError(
                "training states are saved and loaded by whole parameters; found a mesh with the dimension 'tp', along "
                "which they are sharded. Save step.full_state_dict(), and the optimizer's state_dict() of each process"
            )
        ranks, replicas = len(place.processes), len(place.replicas)
        index = place.replica * ranks + place.rank
        return cls(source, engine.pipe, optimized, used, place.rank, place.replica, index, ranks * replicas)

    @cached_property
    def names(self) -> Names:
        return Names.in_model(self.source)

    @cached_property
    def live(self) -> Mapping[str, Tensor]:
        """Tensors of the model and its loss, by canonical name."""
        return self.source.tensors

    @cached_property
    def owned(self) -> frozenset[str]:
        """The tensors whose values this rank gives, under each of their names."""
        owner = owning_ranks(self.pipe, self.live)
        own = [name for name, rank in owner.items() if self.rank in (None, rank)]
        return frozenset(alias for name in own for alias in self.names.of[name])

    @cached_property
    def written(self) -> frozenset[str]:
        """Buffers that steps write: each replica has its own."""
        phases = (phase for stage in self.pipe.stages for phase in stage.phases.values())
        return frozenset(name for phase in phases for name in phase.updates)

    @cached_property
    def kept(self) -> list[str]:
        """What of the model a checkpoint has: parameters, buffers of its state_dict, and those that steps write."""
        found = self.names.kept | self.written
        return [name for name, tensor in self.live.items() if name in found or isinstance(tensor, nn.Parameter)]

    def key(self, name: str) -> str:
        """Under which this replica's value of a tensor is kept."""
        return f"replica.{self.replica}.{name}" if self.replica and name in self.written else f"model.{name}"


def optimized_of(engine: Engine) -> list[Optimized]:
    """The parameters as optimizers have them: with ZeRO-1, this replica's shards."""
    shards = engine.shards
    if shards is None:
        return [Optimized(parameter, (name,)) for name, parameter in engine.parameters.items()]
    found = []
    for bucket in shards.buckets:
        own, pieces, at = shards.parameters[bucket.key], list[Piece](), 0
        low = shards.replica * own.numel()
        for name, layout, size in zip(bucket.names, bucket.layouts, bucket.sizes, strict=True):
            begin, end = max(low - at, 0), min(low + own.numel() - at, size)
            if begin < end:
                pieces.append(Piece(name, layout.shape, layout.stride, begin, end, max(at - low, 0)))
            at += size
        found.append(Optimized(own, bucket.names, tuple(pieces)))
    return found
