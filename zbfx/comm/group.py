"""Messages and sums between processes, over the channels of a pipeline: the transport of `pipe.bind()`.
In: the `Message`s of one rank's program, `Channels`. Out: a `Transport` (`zbfx.program.ops`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from zbfx.comm.channels import Channels
from zbfx.comm.process_groups import Transfer
from zbfx.comm.together import waiting
from zbfx.program.messages import Message
from zbfx.program.ops import laid_out


@dataclass(slots=True)
class GroupTransport:
    """The messages and sums of one rank, whose partners are other processes."""

    messages: Mapping[str, Message]
    channels: Channels
    posted: dict[str, tuple[list[Transfer], tuple[Tensor, ...]]] = field(default_factory=dict)
    sent: dict[str, list[tuple[Transfer, Tensor]]] = field(default_factory=dict)
    reducing: dict[str, dist.Work] = field(default_factory=dict)
    gathering: dict[str, dist.Work] = field(default_factory=dict)
    sharded: Collection[str] = ()  # buckets of whose sum each replica needs its own part only

    @property
    def name(self) -> str:
        return self.channels.name

    def post(self, key: str) -> None:
        assert key not in self.posted, f"{self.name}: {key} is posted twice"
        message = self.messages[key]
        values = tuple(layout.empty(self.channels.device) for layout in message.layouts)
        with waiting(self.name, self.arriving(key)):
            works = [self.channels.transfer(flat(value), message.source, message.target) for value in values]
        self.posted[key] = works, values

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
            self.sent[key] = [(self.channels.transfer(value, message.source, message.target), value) for value in dense]

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
        """Wait until all that is sent has left, and all that is posted or gathered has come. Returns what is posted."""
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


def flat(value: Tensor) -> Tensor:
    return value.as_strided((value.numel(),), (1,))
