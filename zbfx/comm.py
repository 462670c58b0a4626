"""What a rank program calls to exchange values, and the two transports behind it: one process, or torch.distributed.

Nothing here is global: programs get their transport as an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.errors import PipelineFault

if TYPE_CHECKING:
    from zbfx.batch import TensorSpec
    from zbfx.channels import Channels
    from zbfx.messages import Message, TensorLayout


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
        self.posted: set[str] = set()

    def post(self, key: str) -> None:
        """The mailbox takes any message; programs that forget this would fail between processes."""
        assert key not in self.posted, f"{self.name}: {key} is posted twice"
        self.posted.add(key)

    def posted_once(self, key: str) -> None:
        self.posted.add(key)

    def ready(self, key: str) -> bool:
        assert key in self.posted, f"{self.name}: {key} is received before it is posted"
        return key in self.mailbox

    def receive(self, key: str) -> tuple[Tensor, ...]:
        self.posted.remove(key)
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
        self.posted.clear()


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
