"""What a rank program calls to exchange values, and the two transports behind it: one process, or torch.distributed.

Nothing here is global: programs get their transport as an argument.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx._torch import group_store, join_shards, sum_shards
from zbfx.errors import PipelineFault
from zbfx.place import Place

if TYPE_CHECKING:
    from zbfx.batch import TensorSpec
    from zbfx.messages import Message, TensorLayout


NCCL_BLOCKS = 2  # thread blocks per communicator: enough to hide a message behind an action
NCCL_REDUCTION_BLOCKS = 8  # of a communicator that reduces gradients beside the last Ws
FAULT_KEY = "fault"
FAULT_GRACE = timedelta(seconds=3)  # how long a rank that lost a connection waits for the reason


class Microbatch(NamedTuple):
    """The tensors of one microbatch by name, and the seed of its random numbers."""

    inputs: Mapping[str, Tensor]
    seed: int


class Transport(Protocol):
    """Moves messages between the ranks of a pipeline; `key` names a message of the rank's program, `name` the rank."""

    @property
    def name(self) -> str: ...

    def post(self, key: str) -> None: ...

    def ready(self, key: str) -> bool: ...

    def receive(self, key: str) -> tuple[Tensor, ...]: ...

    def send(self, key: str, values: tuple[Tensor, ...]) -> None: ...

    def release(self, key: str) -> None: ...

    def reduce(self, key: str, gradients: Tensor) -> None: ...

    def reduced(self, key: str) -> None: ...

    def gather(self, key: str, parameters: Tensor) -> None: ...

    def gathered(self, key: str) -> None: ...

    def finish(self) -> None: ...

    def drop(self) -> None: ...

    def posted_once(self, key: str) -> None: ...

    def join(self) -> set[str]: ...


def post(transport: Transport, key: str) -> None:
    """Get ready for a message that will be received."""
    transport.post(key)


def receive(transport: Transport, key: str) -> tuple[Tensor, ...]:
    """The values of a message."""
    return transport.receive(key)


def send(transport: Transport, key: str, values: tuple[Tensor, ...]) -> None:
    """Hand values over to another rank; they may still be on their way when this returns."""
    transport.send(key, values)


def release(transport: Transport, key: str) -> None:
    """Wait until a sent message has arrived, and let go of its values."""
    transport.release(key)


def reduce(transport: Transport, key: str, gradients: Tensor) -> None:
    """Start to sum a flat tensor of gradients over the replicas, in place."""
    transport.reduce(key, gradients)


def reduced(transport: Transport, key: str) -> None:
    """Wait until a sum over the replicas is there."""
    transport.reduced(key)


def gather(transport: Transport, key: str, parameters: Tensor) -> None:
    """Start to collect the replicas' shards of a flat tensor of parameters, in place."""
    transport.gather(key, parameters)


def gathered(transport: Transport, key: str) -> None:
    """Wait until all shards are there."""
    transport.gathered(key)


def laid_out(value: Tensor, layout: TensorLayout | TensorSpec) -> Tensor:
    """The value with the strides that the receiver's graph was traced with."""
    assert value.shape == layout.shape, (value.shape, layout)
    assert value.dtype == layout.dtype, (value.dtype, layout)
    if value.stride() == layout.stride:
        return value
    result = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=value.device)
    return result.copy_(value)


def flat(value: Tensor) -> Tensor:
    """A dense tensor's memory as one contiguous dimension."""
    return value.as_strided((value.numel(),), (1,))


class LocalTransport:
    """All ranks in one process: messages are left in a mailbox that the ranks share, in the order of sending."""

    def __init__(
        self, name: str, messages: Mapping[str, Message], mailbox: dict[str, list[tuple[Tensor, ...]]]
    ) -> None:
        self.name, self.messages, self.mailbox = name, messages, mailbox

    def post(self, key: str) -> None:
        """Nothing to do: the mailbox takes any message."""

    def posted_once(self, key: str) -> None:
        """Nothing to do."""

    def ready(self, key: str) -> bool:
        return key in self.mailbox

    def receive(self, key: str) -> tuple[Tensor, ...]:
        first, *others = self.mailbox.pop(key)
        if others:
            self.mailbox[key] = others
        return first

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        layouts = self.messages[key].layouts
        sent = tuple(laid_out(v, layout) for v, layout in zip(values, layouts, strict=True))
        self.mailbox.setdefault(key, []).append(sent)

    def release(self, key: str) -> None:
        """Nothing to do: the mailbox holds what was sent."""

    def reduce(self, key: str, gradients: Tensor) -> None:
        """Nothing to do: one process runs one replica."""

    def reduced(self, key: str) -> None:
        """Nothing to do."""

    def gather(self, key: str, parameters: Tensor) -> None:
        """Nothing to do."""

    def gathered(self, key: str) -> None:
        """Nothing to do."""

    def finish(self) -> None:
        """Nothing is on its way once a program has ended."""

    def join(self) -> set[str]:
        """Nothing is on its way."""
        return set()

    def drop(self) -> None:
        self.mailbox.clear()


def new_group(
    processes: Iterable[int], timeout: timedelta, device: torch.device, blocks: int = NCCL_BLOCKS
) -> dist.ProcessGroup:
    """A process group; every process of the world calls this, member or not.

    A receive that waits keeps its thread blocks spinning on the device: NCCL gets few of them, and a stream whose
    kernels start ahead of queued compute.
    """
    if device.type != "cuda":
        return dist.new_group(sorted(processes), timeout=timeout, backend="gloo")
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = blocks
    return dist.new_group(sorted(processes), timeout=timeout, backend="nccl", pg_options=options)


class Channels:
    """The process groups of one pipeline: one for each direction of each pair of ranks, one of all its ranks, and,
    where it has replicas, one of all processes of all replicas (`family`) and one of this rank's in each (`peers`).

    Every process of the world creates the groups of all pipelines, in one order. `open` creates and warms the groups
    of the pairs, by every rank in the same order: communicators that are created lazily, inside a running pipeline,
    deadlock as soon as receives are posted ahead.
    """

    def __init__(self, place: Place, device: torch.device, timeout: timedelta) -> None:
        self.place, self.device, self.timeout = place, device, timeout
        self.group = self.own_group(place.pipelines())
        self.family, self.peers, self.control = self.group, None, None
        if len(place.replicas) > 1:
            self.family = self.own_group(p for family in place.families for p in [[d for r in family for d in r]])
            lines = [line for family in place.families for line in zip(*family, strict=True)]
            self.peers = self.own_group(lines, NCCL_REDUCTION_BLOCKS)
            self.control = self.own_group(lines, device=torch.device("cpu"))
            self.sum_over_replicas(torch.zeros(1, device=device)).wait()
        self.store = group_store(self.family)
        self.pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.opened: set[tuple[int, int]] = set()  # of all ranks, the same on each

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def name(self) -> str:
        return self.place.name

    def own_group(
        self, parties: Iterable[Iterable[int]], blocks: int = NCCL_BLOCKS, device: torch.device | None = None
    ) -> Any:
        """Create the group of each party, all processes alike; returns that of this process, None if it has none."""
        own = None
        for party in map(sorted, parties):
            group = new_group(party, self.timeout, device or self.device, blocks)
            own = group if dist.get_rank() in party else own
        return own

    def open(self, pairs: Collection[tuple[int, int]]) -> None:
        """Open a channel for each (source, target) that has none; the ranks must agree on `pairs`, or they wait for
        each other."""
        for source, target in sorted(set(pairs) - self.opened):
            self.opened.add((source, target))
            group = self.own_group((pipeline[source], pipeline[target]) for pipeline in self.place.pipelines())
            if self.rank in (source, target):
                self.pairs[source, target] = group
                self.copy(torch.zeros(1, device=self.device), source, target)

    def isend(self, value: Tensor, target: int) -> dist.Work:
        work = dist.isend(value, dst=self.place.processes[target], group=self.pairs[self.rank, target])
        assert work is not None, "this process is one of the two"
        return work

    def irecv(self, value: Tensor, source: int) -> dist.Work:
        work = dist.irecv(value, src=self.place.processes[source], group=self.pairs[source, self.rank])
        assert work is not None, "this process is one of the two"
        return work

    def copy(self, value: Tensor, source: int, target: int) -> None:
        """Overwrite `value` on rank `target` with that of rank `source`, bytes as they are; both call it."""
        bits = value.contiguous().reshape(-1).view(torch.uint8)
        (self.isend(bits, target) if self.rank == source else self.irecv(bits, source)).wait()
        if self.rank == target:
            value.copy_(bits.view(value.dtype).view(value.shape))

    def broadcast(self, value: Tensor, source: int) -> None:
        """Rank `source`'s value on every rank of this pipeline."""
        dist.broadcast(value, src=self.place.processes[source], group=self.group)

    def sum_over_replicas(self, value: Tensor) -> dist.Work:
        """Start to sum a value of this rank over the replicas, in place."""
        work: dist.Work | None = dist.all_reduce(value, group=self.peers, async_op=True)
        assert work is not None, "this process is a member"
        return work

    def shard(self, flat: Tensor) -> Tensor:
        """This replica's part of a flat tensor."""
        return flat.chunk(len(self.place.replicas))[self.place.replica]

    def sum_shards(self, flat: Tensor) -> dist.Work:
        """Start to sum a flat tensor over the replicas; only this one's part of it is then the sum."""
        assert self.peers is not None, "shards need replicas"
        return sum_shards(self.shard(flat), flat, self.peers)

    def join_shards(self, flat: Tensor) -> dist.Work:
        """Start to collect each replica's part of a flat tensor from it."""
        assert self.peers is not None, "shards need replicas"
        return join_shards(flat, self.shard(flat), self.peers)

    def from_replicas(self, value: Tensor) -> Tensor:
        """This rank's value in every replica, stacked along a new first dimension."""
        values = [torch.empty_like(value) for _ in self.place.replicas]
        dist.all_gather(values, value, group=self.peers)
        return torch.stack(values)

    def from_first_replica(self, value: Tensor) -> Tensor:
        """This rank's value in replica 0."""
        value = value.clone()
        dist.broadcast(value, src=self.place.peers[0], group=self.peers)
        return value

    def add_up(self, value: Tensor) -> None:
        """Overwrite `value` on every rank with the sum over all ranks."""
        dist.all_reduce(value, group=self.group)

    def barrier(self) -> None:
        """Wait until every rank's device has come this far, in all replicas."""
        for process in (process for replica in self.place.replicas for process in replica):
            dist.broadcast(torch.zeros(1, device=self.device), src=process, group=self.family)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: object) -> list[Any]:
        """The picklable value of every rank of every replica, in order, on every one."""
        values: list[Any] = [None] * dist.get_world_size(self.family)
        dist.all_gather_object(values, value, group=self.family)
        return values

    def gather_ranks(self, value: object) -> list[Any]:
        """The same over the ranks of this pipeline alone."""
        values: list[Any] = [None] * len(self.place.processes)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_peers(self, value: object) -> list[Any]:
        """The picklable value of this rank in every replica; goes round the device."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * len(self.place.peers)
        dist.all_gather_object(values, value, group=self.control)
        return values

    def refused_by_all(self, step: int) -> bool:
        """Called by a rank that refuses its batch: whether all ranks do, within a few seconds."""
        key = f"refused {step}"
        everyone = len(self.place.names())
        deadline = time.monotonic() + FAULT_GRACE.total_seconds()
        refusals = self.store.add(key, 1)
        while refusals < everyone and time.monotonic() < deadline:
            time.sleep(0.02)
            refusals = self.store.add(key, 0)
        return refusals >= everyone

    def fail(self, error: BaseException) -> str:
        """Tell the other ranks why this one fails, or learn why they do, and close all connections: ranks that wait
        for this one fail at once. Returns the first failure of all ranks."""
        first = self.first_fault(
            str(error) if isinstance(error, PipelineFault) else f"{self.name}: {type(error).__name__}: {error}"
        )
        traceback.clear_frames(error.__traceback__)  # pending operations in their locals keep connections open
        self.close()
        return first

    def close(self) -> None:
        """Close all connections."""
        groups = [*self.pairs.values(), self.group, self.peers, self.control, self.family]
        for group in dict.fromkeys(group for group in groups if group is not None):
            dist.destroy_process_group(group)
        self.pairs.clear()
        self.group = self.family = self.peers = self.control = None

    def first_fault(self, own: str) -> str:
        try:
            # A rank that lost a connection leaves the first word to the rank that broke it.
            if "waiting for" in own:
                with suppress(Exception):
                    self.store.wait([FAULT_KEY], FAULT_GRACE)
            # The store takes the first value that arrives and returns it to all.
            return self.store.compare_set(FAULT_KEY, "", own).decode()
        except Exception:
            return own  # the process that holds the store is gone


@dataclass
class GroupTransport:
    """Messages over torch.distributed."""

    messages: Mapping[str, Message]
    channels: Channels
    posted: dict[str, tuple[list[dist.Work], tuple[Tensor, ...]]] = field(default_factory=dict)
    sent: dict[str, list[tuple[dist.Work, Tensor]]] = field(default_factory=dict)
    reducing: dict[str, dist.Work] = field(default_factory=dict)
    gathering: dict[str, dist.Work] = field(default_factory=dict)
    sharded: Collection[str] = ()  # the buckets of which each replica needs a part of the sum alone

    @property
    def name(self) -> str:
        return self.channels.name

    def post(self, key: str) -> None:
        message = self.messages[key]
        values = tuple(
            torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self.channels.device)
            for layout in message.layouts
        )
        self.posted[key] = ([self.channels.irecv(flat(value), message.source) for value in values], values)

    def posted_once(self, key: str) -> None:
        """Post a receive unless it is posted already."""
        if key not in self.posted:
            self.post(key)

    def ready(self, key: str) -> bool:
        """`receive` waits for what has not arrived."""
        return True

    def receive(self, key: str) -> tuple[Tensor, ...]:
        works, values = self.posted.pop(key)
        for work in works:
            self.wait(work, f"message {key} from rank {self.messages[key].source}, which")
        return values

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        message = self.messages[key]
        dense = [flat(laid_out(value, layout)) for value, layout in zip(values, message.layouts, strict=True)]
        self.sent[key] = [(self.channels.isend(value, message.target), value) for value in dense]

    def release(self, key: str) -> None:
        for work, _ in self.sent.pop(key, ()):  # `join` may have waited for it
            self.wait(work, f"message {key} to rank {self.messages[key].target}, which")

    def reduce(self, key: str, gradients: Tensor) -> None:
        start = self.channels.sum_shards if key in self.sharded else self.channels.sum_over_replicas
        self.reducing[key] = start(gradients)

    def reduced(self, key: str) -> None:
        self.wait(self.reducing.pop(key), f"the sum of {key} over the replicas, one of which")

    def gather(self, key: str, parameters: Tensor) -> None:
        self.gathering[key] = self.channels.join_shards(parameters)

    def gathered(self, key: str) -> None:
        self.wait(self.gathering.pop(key), f"the shards of {key} from the replicas, one of which")

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for key in list(self.sent):
            self.release(key)

    def join(self) -> set[str]:
        """Wait until everything sent has left and everything posted has come; returns the latter's keys, which are
        received later."""
        for key, (works, values) in list(self.posted.items()):
            for work in works:
                self.wait(work, f"message {key} from rank {self.messages[key].source}")
            self.posted[key] = ([], values)
        self.finish()
        return set(self.posted)

    def wait(self, work: dist.Work, what: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PipelineFault(
                f"{self.name}: waiting for {what} is lost, or slower than the timeout: {error}"
            ) from error

    def drop(self) -> None:
        """Forget what is on its way, after a failure."""
        self.posted.clear()
        self.sent.clear()
        self.reducing.clear()
        self.gathering.clear()
