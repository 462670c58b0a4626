"""What a rank program calls to exchange values, and the two transports behind it: one process, or torch.distributed.

Nothing here is global: programs get their transport as an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from zbfx.messages import Message, TensorLayout


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

    def finish(self) -> None: ...


def post(transport: Transport, key: str) -> None:
    """Get ready for a message that will be received."""
    transport.post(key)


def receive(transport: Transport, key: str) -> tuple[Tensor, ...]:
    """The values of a message."""
    return transport.receive(key)


def send(transport: Transport, key: str, values: tuple[Tensor, ...]) -> None:
    """Hand values over to another rank; they may still be on their way when this returns."""
    transport.send(key, values)


def laid_out(value: Tensor, layout: TensorLayout) -> Tensor:
    """The value with the strides that the receiver's graph was traced with."""
    assert value.shape == layout.shape and value.dtype == layout.dtype, (value.shape, value.dtype, layout)
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

    def finish(self) -> None:
        """Nothing is on its way once a program has ended."""


@dataclass
class GroupTransport:
    """Messages over torch.distributed, one process group for each direction of each pair of ranks.

    `channels[source, target]` are pipeline ranks; `ranks` maps them to global ranks.
    """

    rank: int
    ranks: Sequence[int]
    device: torch.device
    messages: Mapping[str, Message]
    channels: Mapping[tuple[int, int], dist.ProcessGroup]
    posted: dict[str, tuple[list[dist.Work], tuple[Tensor, ...]]] = field(default_factory=dict)
    sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def post(self, key: str) -> None:
        message = self.messages[key]
        group = self.channels[message.source, self.rank]
        values = tuple(
            torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self.device)
            for layout in message.layouts
        )
        works = [dist.irecv(flat(v), src=self.ranks[message.source], group=group) for v in values]
        self.posted[key] = (works, values)  # type: ignore[assignment]

    def ready(self, key: str) -> bool:
        """`receive` waits for what has not arrived."""
        return True

    def receive(self, key: str) -> tuple[Tensor, ...]:
        works, values = self.posted.pop(key)
        for work in works:
            work.wait()
        return values

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        message = self.messages[key]
        group = self.channels[self.rank, message.target]
        self.sending = [(work, value) for work, value in self.sending if not work.is_completed()]
        for value, layout in zip(values, message.layouts, strict=True):
            dense = flat(laid_out(value, layout))
            work = dist.isend(dense, dst=self.ranks[message.target], group=group)
            self.sending.append((work, dense))  # type: ignore[arg-type]

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self.sending:
            work.wait()
        self.sending.clear()


def open_channels(
    rank: int, ranks: Sequence[int], pairs: Sequence[tuple[int, int]], device: torch.device, timeout: timedelta
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """Create and warm a process group for each (source, target) of `pairs` that `rank` belongs to.

    Every rank walks the same pairs in the same order: communicators that are created lazily, inside a running
    pipeline, deadlock as soon as receives are posted ahead.
    """
    channels = {}
    for source, target in sorted(pairs):
        if rank in (source, target):
            members = sorted((ranks[source], ranks[target]))
            group = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
            assert group is not None
            token = torch.zeros(1, device=device)
            if rank == source:
                dist.send(token, dst=ranks[target], group=group)
            else:
                dist.recv(token, src=ranks[source], group=group)
            channels[source, target] = group
    return channels
