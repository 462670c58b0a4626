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
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx._torch import group_store
from zbfx.errors import PipelineFault

if TYPE_CHECKING:
    from zbfx.batch import TensorSpec
    from zbfx.messages import Message, TensorLayout


NCCL_BLOCKS = 2  # thread blocks per communicator: enough to hide a message behind an action
FAULT_KEY = "fault"
FAULT_GRACE = timedelta(seconds=3)  # how long a rank that lost a connection waits for the reason


class Microbatch(NamedTuple):
    """The tensors of one microbatch by name, and the seed of its random numbers."""

    inputs: Mapping[str, Tensor]
    seed: int


class Transport(Protocol):
    """Moves messages between the ranks of one pipeline; `key` names a message of the rank's program."""

    def post(self, key: str) -> None: ...

    def ready(self, key: str) -> bool: ...

    def receive(self, key: str) -> tuple[Tensor, ...]: ...

    def send(self, key: str, values: tuple[Tensor, ...]) -> None: ...

    def release(self, key: str) -> None: ...

    def finish(self) -> None: ...

    def drop(self) -> None: ...


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
    """All ranks in one process: messages are left in a mailbox that the ranks share."""

    def __init__(self, messages: Mapping[str, Message], mailbox: dict[str, tuple[Tensor, ...]]) -> None:
        self.messages, self.mailbox = messages, mailbox

    def post(self, key: str) -> None:
        """Nothing to do: the mailbox takes any message."""

    def ready(self, key: str) -> bool:
        return key in self.mailbox

    def receive(self, key: str) -> tuple[Tensor, ...]:
        return self.mailbox.pop(key)

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        layouts = self.messages[key].layouts
        self.mailbox[key] = tuple(laid_out(v, layout) for v, layout in zip(values, layouts, strict=True))

    def release(self, key: str) -> None:
        """Nothing to do: the mailbox holds what was sent."""

    def finish(self) -> None:
        """Nothing is on its way once a program has ended."""

    def drop(self) -> None:
        self.mailbox.clear()


def new_group(ranks: Iterable[int], timeout: timedelta, device: torch.device) -> dist.ProcessGroup:
    """A process group; every process of the world calls this, member or not.

    A receive that waits keeps its thread blocks spinning on the device: NCCL gets few of them, and a stream whose
    kernels start ahead of queued compute.
    """
    if device.type != "cuda":
        return dist.new_group(sorted(ranks), timeout=timeout)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = NCCL_BLOCKS
    return dist.new_group(sorted(ranks), timeout=timeout, backend="nccl", pg_options=options)


class Channels:
    """The process groups of one pipeline: one for each direction of each pair of ranks, and one of all ranks.

    The pipeline's ranks are the world's. `open` creates and warms the groups of the pairs, by every rank in the same
    order: communicators that are created lazily, inside a running pipeline, deadlock as soon as receives are posted
    ahead.
    """

    def __init__(self, rank: int, device: torch.device, timeout: timedelta) -> None:
        self.rank, self.device, self.timeout = rank, device, timeout
        self.group: dist.ProcessGroup | None = new_group(range(dist.get_world_size()), timeout, device)
        self.store = group_store(self.group)
        self.pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        self.opened: set[tuple[int, int]] = set()  # of all ranks, the same on each

    def open(self, pairs: Collection[tuple[int, int]]) -> None:
        """Open a channel for each (source, target) that has none; the ranks must agree on `pairs`, or they wait for
        each other."""
        for source, target in sorted(set(pairs) - self.opened):
            self.opened.add((source, target))
            group = new_group((source, target), self.timeout, self.device)
            if self.rank in (source, target):
                self.pairs[source, target] = group
                self.copy(torch.zeros(1, device=self.device), source, target)

    def isend(self, value: Tensor, target: int) -> dist.Work:
        work = dist.isend(value, dst=target, group=self.pairs[self.rank, target])
        assert work is not None, "this process is one of the two"
        return work

    def irecv(self, value: Tensor, source: int) -> dist.Work:
        work = dist.irecv(value, src=source, group=self.pairs[source, self.rank])
        assert work is not None, "this process is one of the two"
        return work

    def copy(self, value: Tensor, source: int, target: int) -> None:
        """Overwrite `value` on rank `target` with that of rank `source`; both call it."""
        (self.isend(value, target) if self.rank == source else self.irecv(value, source)).wait()

    def broadcast(self, value: Tensor, source: int) -> None:
        dist.broadcast(value, src=source, group=self.group)

    def barrier(self) -> None:
        """Wait until every rank's device has come this far."""
        for source in range(dist.get_world_size()):
            self.broadcast(torch.zeros(1, device=self.device), source)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: object) -> list[object]:
        """The picklable value of every rank, in order, on every rank."""
        values: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def refused_by_all(self, step: int) -> bool:
        """Called by a rank that refuses its batch: whether all ranks do, within a few seconds."""
        key = f"refused {step}"
        world = dist.get_world_size()
        deadline = time.monotonic() + FAULT_GRACE.total_seconds()
        refusals = self.store.add(key, 1)
        while refusals < world and time.monotonic() < deadline:
            time.sleep(0.02)
            refusals = self.store.add(key, 0)
        return refusals >= world

    def fail(self, error: BaseException) -> str:
        """Tell the other ranks why this one fails, or learn why they do, and close all connections: ranks that wait
        for this one fail at once. Returns the first failure of all ranks."""
        first = self.first_fault(
            str(error) if isinstance(error, PipelineFault) else f"rank {self.rank}: {type(error).__name__}: {error}"
        )
        traceback.clear_frames(error.__traceback__)  # pending operations in their locals keep connections open
        for group in (*self.pairs.values(), self.group):
            dist.destroy_process_group(group)
        self.pairs.clear()
        self.group = None
        return first

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

    def post(self, key: str) -> None:
        message = self.messages[key]
        values = tuple(
            torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self.channels.device)
            for layout in message.layouts
        )
        self.posted[key] = ([self.channels.irecv(flat(value), message.source) for value in values], values)

    def ready(self, key: str) -> bool:
        """`receive` waits for what has not arrived."""
        return True

    def receive(self, key: str) -> tuple[Tensor, ...]:
        works, values = self.posted.pop(key)
        for work in works:
            self.wait(work, key, "from", self.messages[key].source)
        return values

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        message = self.messages[key]
        dense = [flat(laid_out(value, layout)) for value, layout in zip(values, message.layouts, strict=True)]
        self.sent[key] = [(self.channels.isend(value, message.target), value) for value in dense]

    def release(self, key: str) -> None:
        for work, _ in self.sent.pop(key):
            self.wait(work, key, "to", self.messages[key].target)

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for key in list(self.sent):
            self.release(key)

    def wait(self, work: dist.Work, key: str, direction: str, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PipelineFault(
                f"rank {self.channels.rank}: waiting for message {key} {direction} rank {peer}, which is lost, or "
                f"slower than the timeout: {error}"
            ) from error

    def drop(self) -> None:
        """Forget what is on its way, after a failure."""
        self.posted.clear()
        self.sent.clear()
