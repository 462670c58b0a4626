"""Where a process stands among all of torch.distributed: which rank of a pipeline, in which of its replicas.
In: the number of ranks, and a mesh where there are replicas. Out: `Place`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zbfx.errors import ZbfxError, listed

REPLICAS, RANKS, SHARDS = "dp", "pp", "tp"  # the mesh dimensions that zbfx knows

Replicas = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """`families[f][d][r]` is the process that runs rank r of replica d. Replicas of one family share gradients. Each
    `shard_count` families in a row hold the shards of one model; else families know nothing of each other. This
    process is `rank` of `replica`."""

    families: tuple[Replicas, ...]
    family: int
    replica: int
    rank: int
    shard_count: int = 1

    @property
    def replicas(self) -> Replicas:
        return self.families[self.family]

    @property
    def processes(self) -> tuple[int, ...]:
        """This process's pipeline: the process of each rank."""
        return self.replicas[self.replica]

    @property
    def peers(self) -> tuple[int, ...]:
        """The processes that run this process's rank, one a replica."""
        return tuple(replica[self.rank] for replica in self.replicas)

    @property
    def shards(self) -> tuple[int, ...]:
        """The processes that run this process's rank of its replica, one a shard of the model."""
        return next(line for line in self.shard_lines() if self.processes[self.rank] in line)

    @property
    def name(self) -> str:
        return self.name_of(self.replica, self.rank)

    def name_of(self, replica: int, rank: int) -> str:
        """`rank 2`, or `shard 0, replica 1, rank 2` where there are several."""
        shard = f"shard {self.family % self.shard_count}, " if self.shard_count > 1 else ""
        return shard + (f"rank {rank}" if len(self.replicas) == 1 else f"replica {replica}, rank {rank}")

    def names(self) -> list[str]:
        """The names of all processes of the family, by replica and rank."""
        return [self.name_of(d, r) for d, replica in enumerate(self.replicas) for r in range(len(replica))]

    def pipelines(self) -> Iterator[tuple[int, ...]]:
        """Every pipeline of every family, in an order that all processes share."""
        return (replica for family in self.families for replica in family)

    def models(self) -> Iterator[tuple[int, ...]]:
        """The processes that hold one model, in all its shards and replicas, in an order that all processes share."""
        for first in range(0, len(self.families), self.shard_count):
            together = self.families[first : first + self.shard_count]
            yield tuple(process for family in together for replica in family for process in replica)

    def shard_lines(self) -> Iterator[tuple[int, ...]]:
        """The processes that hold the shards of one stage, of every rank, in an order that all processes share."""
        for first in range(0, len(self.families), self.shard_count):
            for replicas in zip(*self.families[first : first + self.shard_count], strict=True):
                yield from zip(*replicas, strict=True)


def find_place(rank_count: int, rank_or_mesh: int | DeviceMesh | None, independent: tuple[str, ...] = ()) -> Place:
    """This process's place; raises `ZbfxError` where ranks, processes and mesh do not fit. Pipelines along the mesh
    dimensions named `independent` know nothing of each other."""
    if not dist.is_initialized():
        raise ZbfxError(
            "bind runs under torch.distributed: start with `torchrun --nproc-per-node=...` and call "
            "torch.distributed.init_process_group first, or use run_local() in one process"
        )
    if isinstance(rank_or_mesh, DeviceMesh):
        return place_in(rank_or_mesh, rank_count, independent)
    if independent:
        raise ZbfxError(f"independent names dimensions of a DeviceMesh; found {independent} and no mesh")
    world, own = dist.get_world_size(), dist.get_rank()
    if world != rank_count:
        raise ZbfxError(
            f"the pipeline has {rank_count} ranks, torch.distributed has {world}: start {rank_count} processes, or "
            f"pass a DeviceMesh with the dimensions ('{REPLICAS}', '{RANKS}') for several replicas"
        )
    if rank_or_mesh not in (None, own):
        raise ZbfxError(f"rank is this process's rank in torch.distributed, {own}; found {rank_or_mesh!r}")
    return Place(((tuple(range(world)),),), 0, 0, own)


def place_in(mesh: DeviceMesh, rank_count: int, independent: tuple[str, ...]) -> Place:
    names = mesh.mesh_dim_names or ()
    if RANKS not in names:
        raise ZbfxError(
            f"a mesh for a pipeline names its dimension of ranks '{RANKS}', and that of replicas '{REPLICAS}'; "
            f"found {names}. Pass init_device_mesh(..., mesh_dim_names=('{REPLICAS}', '{RANKS}'))"
        )
    refuse_unknown(names, independent)
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    if sizes[RANKS] != rank_count:
        raise ZbfxError(f"the pipeline has {rank_count} ranks; found a mesh with {RANKS}={sizes[RANKS]}")
    known = [name for name in (SHARDS, REPLICAS, RANKS) if name in names]
    order = [names.index(name) for name in (*(n for n in names if n not in known), *known)]
    replica_count, shard_count = sizes.get(REPLICAS, 1), sizes.get(SHARDS, 1)
    processes = mesh.mesh.permute(order).reshape(-1, replica_count, rank_count).tolist()
    families = tuple(tuple(map(tuple, family)) for family in processes)
    world = dist.get_world_size()
    if sorted(mesh.mesh.flatten().tolist()) != list(range(world)):
        raise ZbfxError(
            f"a mesh for a pipeline holds each of the {world} processes of torch.distributed once, for all create the "
            f"communicators together; found {mesh}. Pass the whole mesh, not a part like mesh['{RANKS}']"
        )
    own = dist.get_rank()
    place = next(
        Place(families, f, d, r, shard_count)
        for f, family in enumerate(families)
        for d, replica in enumerate(family)
        for r, process in enumerate(replica)
        if process == own
    )
    lines = [line for family in families for line in (*family, *zip(*family, strict=True))]
    if not all(list(line) == sorted(line) for line in (*lines, *place.shard_lines())):
        raise ZbfxError(f"processes grow along each dimension of a mesh for a pipeline; found {mesh}")
    return place


def refuse_unknown(names: Sequence[str], independent: Sequence[str]) -> None:
    """Raise `ZbfxError` for a mesh dimension that means nothing here, unless the caller says that nothing is meant."""
    known = (REPLICAS, RANKS, SHARDS)
    strange = [name for name in names if name not in (*known, *independent)]
    if strange:
        raise ZbfxError(
            f"the dimensions of a mesh are '{REPLICAS}' (replicas), '{RANKS}' (ranks), '{SHARDS}' (shards of a model "
            f"with DTensors); found {listed(map(repr, strange))}, over which nothing would be summed. Name replicas "
            f"'{REPLICAS}', or call bind(mesh, independent={tuple(strange)}) for pipelines that train apart"
        )
    wrong = [name for name in independent if name not in names or name in known]
    if wrong:
        raise ZbfxError(
            f"independent names dimensions of the mesh beside '{REPLICAS}', '{RANKS}', '{SHARDS}'; found "
            f"{listed(map(repr, wrong))} and a mesh of {tuple(names)}"
        )
