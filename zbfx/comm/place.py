"""Where a process stands among all of torch.distributed: which rank of a pipeline, in which of its replicas.

In: the number of ranks, and a mesh where there are replicas. Out: `Place`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zbfx.errors import ZbfxError

REPLICAS, RANKS = "dp", "pp"  # the mesh dimensions that zbfx knows

Replicas = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """`families[f][d][r]` is the process that runs rank r of replica d. Replicas of one family share gradients;
    families (the other dimensions of a mesh) know nothing of each other. This process is `rank` of `replica`."""

    families: tuple[Replicas, ...]
    family: int
    replica: int
    rank: int

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
    def name(self) -> str:
        return self.name_of(self.replica, self.rank)

    def name_of(self, replica: int, rank: int) -> str:
        """`rank 2`, or `replica 1, rank 2` where there are several."""
        return f"rank {rank}" if len(self.replicas) == 1 else f"replica {replica}, rank {rank}"

    def names(self) -> list[str]:
        """The names of all processes of the family, by replica and rank."""
        return [self.name_of(d, r) for d, replica in enumerate(self.replicas) for r in range(len(replica))]

    def pipelines(self) -> Iterator[tuple[int, ...]]:
        """Every pipeline of every family, in an order that all processes share."""
        return (replica for family in self.families for replica in family)


def find_place(rank_count: int, rank_or_mesh: int | DeviceMesh | None) -> Place:
    """This process's place; raises `ZbfxError` where ranks, processes and mesh do not fit."""
    if not dist.is_initialized():
        raise ZbfxError(
            "bind runs under torch.distributed: start with `torchrun --nproc-per-node=...` and call "
            "torch.distributed.init_process_group first, or use run_local() in one process"
        )
    if isinstance(rank_or_mesh, DeviceMesh):
        return place_in(rank_or_mesh, rank_count)
    world, own = dist.get_world_size(), dist.get_rank()
    if world != rank_count:
        raise ZbfxError(
            f"the pipeline has {rank_count} ranks, torch.distributed has {world}: start {rank_count} processes, or "
            f"pass a DeviceMesh with the dimensions ('{REPLICAS}', '{RANKS}') for several replicas"
        )
    if rank_or_mesh not in (None, own):
        raise ZbfxError(f"rank is this process's rank in torch.distributed, {own}; found {rank_or_mesh!r}")
    return Place(((tuple(range(world)),),), 0, 0, own)


def place_in(mesh: DeviceMesh, rank_count: int) -> Place:
    names = mesh.mesh_dim_names or ()
    if RANKS not in names:
        raise ZbfxError(
            f"a mesh for a pipeline names its dimension of ranks '{RANKS}', and that of replicas '{REPLICAS}'; "
            f"found {names}. Pass init_device_mesh(..., mesh_dim_names=('{REPLICAS}', '{RANKS}'))"
        )
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    if sizes[RANKS] != rank_count:
        raise ZbfxError(f"the pipeline has {rank_count} ranks; found a mesh with {RANKS}={sizes[RANKS]}")
    known = [name for name in (REPLICAS, RANKS) if name in names]
    order = [names.index(name) for name in (*(n for n in names if n not in known), *known)]
    replica_count = sizes.get(REPLICAS, 1)
    processes = mesh.mesh.permute(order).reshape(-1, replica_count, rank_count).tolist()
    families = tuple(tuple(map(tuple, family)) for family in processes)
    world = dist.get_world_size()
    if sorted(mesh.mesh.flatten().tolist()) != list(range(world)):
        raise ZbfxError(
            f"a mesh for a pipeline holds each of the {world} processes of torch.distributed once, for all create the "
            f"communicators together; found {mesh}. Pass the whole mesh, not a part like mesh['{RANKS}']"
        )
    for family in families:
        if not all(list(line) == sorted(line) for line in (*family, *zip(*family, strict=True))):
            raise ZbfxError(f"processes grow along each dimension of a mesh for a pipeline; found {mesh}")
    own = dist.get_rank()
    return next(
        Place(families, f, d, r)
        for f, family in enumerate(families)
        for d, replica in enumerate(family)
        for r, process in enumerate(replica)
        if process == own
    )
