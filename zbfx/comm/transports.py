"""The two transports of rank programs (`zbfx.program.ops`): within one process, and over torch.distributed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.comm.channels import Channels, Transfer
from zbfx.comm.together import waiting
from zbfx.program.messages import Message
from zbfx.program.ops import laid_out


def flat(value: Tensor) -> Tensor:
    """A dense tensor's memory as one contiguous dimension."""
    return value.as_strided((value.numel(),), (1,))


@dataclass
class Exchange:
    """A message within one process, from when its reader posts it or its sender sends it."""

    message: Message
    posted: bool = False
    values: tuple[Tensor, ...] | None = None  # from when they are sent until they are received


class Mailbox:
    """The channels between the ranks of one process: as between processes, what is sent first on a channel is received
    by whoever posts first there, whatever either calls it."""

    def __init__(self) -> None:
        self.channels: dict[tuple[int, int], deque[Exchange]] = defaultdict(deque)  # what one side has asked for alone

    def post(self, message: Message) -> Exchange:
        exchange = self.exchange(message, posts=True)
        exchange.posted = True
        return exchange

    def send(self, message: Message, values: tuple[Tensor, ...]) -> Exchange:
        exchange = self.exchange(message, posts=False)
        exchange.values = values
        return exchange

    def exchange(self, message: Message, *, posts: bool) -> Exchange:
        """The first exchange of the channel that waits for this side, or a new one."""
        queue = self.channels[message.source, message.target]
        if not queue or queue[0].posted == posts:
            queue.append(Exchange(message))
            return queue[-1]
        exchange = queue.popleft()
        posted, sent = (message, exchange.message) if posts else (exchange.message, message)
        assert posted == sent, f"rank {message.source} sends {sent}, where rank {message.target} posts {posted}"
        return exchange

    def __len__(self) -> int:
        return sum(map(len, self.channels.values()))


class LocalTransport:
    """All ranks in one process: messages go through a mailbox that the ranks share."""

    def __init__(self, name: str, messages: Mapping[str, Message], mailbox: Mailbox) -> None:
        self.name, self.messages, self.mailbox = name, messages, mailbox
        self.posted: dict[str, Exchange] = {}
        self.sent: dict[str, Exchange] = {}

    def post(self, key: str) -> None:
        assert key not in self.posted, f"{self.name}: {key} is posted twice"
        self.posted[key] = self.mailbox.post(self.messages[key])

    def posted_once(self, key: str) -> None:
        if key not in self.posted:
            self.post(key)

    def ready(self, key: str) -> bool:
        """A send ends once its reader has posted it, as sends between processes may."""
        if key in self.sent:
            return self.sent[key].posted
        assert key in self.posted, f"{self.name}: {key} is received before it is posted, or released before it is sent"
        return self.posted[key].values is not None

    def receive(self, key: str) -> tuple[Tensor, ...]:
        exchange = self.posted.pop(key)
        values, exchange.values = exchange.values, None
        assert values is not None, f"{self.name}: {key} has not arrived"
        return values

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        assert key not in self.sent, f"{self.name}: {key} is sent again before it is released"
        message = self.messages[key]
        sent = tuple(laid_out(v, layout) for v, layout in zip(values, message.layouts, strict=True))
        self.sent[key] = self.mailbox.send(message, sent)

    def release(self, key: str) -> None:
        assert self.ready(key), f"{self.name}: {key} has not left"
        del self.sent[key]

    def reduce(self, key: str, gradients: Tensor) -> None:
        """Nothing to do: one process runs one replica."""

    def reduced(self, key: str) -> None:
        """Nothing to do."""

    def gather(self, key: str, parameters: Tensor) -> None:
        """Nothing to do."""

    def gathered(self, key: str) -> None:
        """Nothing to do."""

    def finish(self) -> None:
        for key in list(self.sent):
            self.release(key)

    def join(self) -> set[str]:
        """For captured graphs."""
        raise AssertionError("graphs are captured by processes that run one rank each")

    def drop(self) -> None:
        """Forget what is on its way, after a failure."""
        self.mailbox.channels.clear()
        self.posted.clear()
        self.sent.clear()


@dataclass
class GroupTransport:
    """Messages over torch.distributed."""

    messages: Mapping[str, Message]
    channels: Channels
    posted: dict[str, tuple[list[Transfer], tuple[Tensor, ...]]] = field(default_factory=dict)
    sent: dict[str, list[tuple[Transfer, Tensor]]] = field(default_factory=dict)
    reducing: dict[str, dist.Work] = field(default_factory=dict)
    gathering: dict[str, dist.Work] = field(default_factory=dict)
    sharded: Collection[str] = ()  # the buckets of which each replica needs a part of the sum alone

    @property
    def name(self) -> str:
        return self.channels.name

    def post(self, key: str) -> None:
        assert key not in self.posted, f"{self.name}: {key} is posted twice"
        message = self.messages[key]
        values = tuple(
            torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self.channels.device)
            for layout in message.layouts
        )
        with waiting(self.name, self.arriving(key)):
            self.posted[key] = ([self.channels.irecv(flat(value), message.source) for value in values], values)

    def posted_once(self, key: str) -> None:
        """Post a receive unless it is posted already."""
        if key not in self.posted:
            self.post(key)

    def ready(self, key: str) -> bool:
        """`receive` and `release` wait by themselves."""
        return True

    def receive(self, key: str) -> tuple[Tensor, ...]:
        works, values = self.posted.pop(key)
        for work in works:
            self.wait(work, self.arriving(key))
        return values

    def arriving(self, key: str) -> str:
        return f"message {key} from rank {self.messages[key].source}, which"

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        assert key not in self.sent, f"{self.name}: {key} is sent again before it is released"
        message = self.messages[key]
        dense = [flat(laid_out(value, layout)) for value, layout in zip(values, message.layouts, strict=True)]
        with waiting(self.name, self.leaving(key)):
            self.sent[key] = [(self.channels.isend(value, message.target), value) for value in dense]

    def release(self, key: str) -> None:
        for work, _ in self.sent.pop(key, ()):  # `join` may have waited for it
            self.wait(work, self.leaving(key))

    def leaving(self, key: str) -> str:
        return f"message {key} to rank {self.messages[key].target}, which"

    def reduce(self, key: str, gradients: Tensor) -> None:
        start = self.channels.sum_shards if key in self.sharded else self.channels.sum_over_replicas
        self.reducing[key] = start(gradients)

    def reduced(self, key: str) -> None:
        self.wait(self.reducing.pop(key), f"the sum of {key} over the replicas, one of which")

    def gather(self, key: str, parameters: Tensor) -> None:
        self.gathering[key] = self.channels.join_shards(parameters)

    def gathered(self, key: str) -> None:
        if key in self.gathering:  # `join` may have waited for it
            self.wait(self.gathering.pop(key), f"the shards of {key} from the replicas, one of which")

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for key in list(self.sent):
            self.release(key)

    def join(self) -> set[str]:
        """Wait until everything sent has left, and everything posted and gathered has come; returns the keys of what
        was posted, which is received later."""
        for key, (works, values) in list(self.posted.items()):
            for work in works:
                self.wait(work, self.arriving(key))
            self.posted[key] = ([], values)
        for key in list(self.gathering):
            self.gathered(key)
        self.finish()
        return set(self.posted)

    def wait(self, work: Transfer, what: str) -> None:
        with waiting(self.name, what):
            work.wait()

    def drop(self) -> None:
        """Forget what is on its way, after a failure."""
        self.channels.abandon(value for _, values in self.posted.values() for value in values)
        self.channels.abandon(value for sent in self.sent.values() for _, value in sent)
        self.posted.clear()
        self.sent.clear()
        self.reducing.clear()
        self.gathering.clear()
