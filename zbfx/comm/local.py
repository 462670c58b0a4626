"""Messages between ranks that all live in one process: the transport of `pipe.run_local()`.
In: the `Message`s of one rank's program, a `Mailbox` that all ranks share. Out: a `Transport` (`zbfx.program.ops`)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from zbfx.program.messages import Message
from zbfx.program.ops import laid_out


@dataclass(slots=True)
class Exchange:
    """A message within one process, since its reader has posted it or its sender has sent it."""

    message: Message
    posted: bool = False
    values: tuple[Tensor, ...] | None = None  # while they are sent and not received


class Mailbox:
    """The channels between the ranks of one process. As between processes, the first message sent on a channel goes to
    the first receive posted there, whatever keys they have."""

    def __init__(self) -> None:
        self.channels: dict[tuple[int, int], deque[Exchange]] = defaultdict(deque)  # begun by one side alone

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
    """The messages of one rank, all of whose partners live in this process: they go through a mailbox."""

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
        """A sent message may be released once its reader has posted it: a send between processes may wait as long."""
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
        raise AssertionError("graphs are captured by processes that run one rank each")

    def drop(self) -> None:
        self.mailbox.channels.clear()
        self.posted.clear()
        self.sent.clear()
