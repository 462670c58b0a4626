"""Messages and sums between processes, over the channels of a pipeline: the transport of `pipe.bind()`.
In: the `Message`s of one rank's program, `Channels`. Out: a `Transport` (`zbfx.program.ops`)."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.comm.channels import Channels
from zbfx.comm.process_groups import Transfer
from zbfx.comm.together import waiting
from zbfx.errors import PipelineFault, listed
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
    checksums: dict[str, Tensor] = field(default_factory=dict)  # of messages on their way, if they are checked

    @property
    def name(self) -> str:
        return self.channels.name

    def post(self, key: str) -> None:
        assert key not in self.posted, f"{self.name}: {key} is posted twice"
        message = self.messages[key]
        values = tuple(layout.empty(self.channels.device) for layout in message.layouts)
        with waiting(self.name, self.arriving(key)):
            works = [self.channels.transfer(flat(value), message.source, message.target) for value in values]
            if self.channels.checks:
                self.checksums[key] = torch.empty(len(values), dtype=torch.int64, device=self.channels.device)
                works.append(self.channels.transfer(self.checksums[key], message.source, message.target))
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
        if self.channels.checks:
            self.compare(key, values)
        return values

    def compare(self, key: str, values: tuple[Tensor, ...]) -> None:
        """Raise `PipelineFault` unless a message has the bits that were sent."""
        sent, found = self.checksums.pop(key).tolist(), [checksum(flat(value)) for value in values]
        wrong = [index for index, (first, second) in enumerate(zip(sent, found, strict=True)) if first != second]
        if wrong:
            raise PipelineFault(
                f"{self.name}: message {key} from rank {self.messages[key].source} came with other bits than were sent "
                f"(values {listed(wrong)} of {len(values)}: CRC-32 {sent[wrong[0]]:08x} was sent, "
                f"{found[wrong[0]]:08x} came). The network, a driver or memory is at fault: find out which, and go on "
                f"from a checkpoint"
            )

    def arriving(self, key: str) -> str:
        return f"message {key} from rank {self.messages[key].source}, which"

    def send(self, key: str, values: tuple[Tensor, ...]) -> None:
        assert key not in self.sent, f"{self.name}: {key} is sent again before it is released"
        message = self.messages[key]
        dense = [flat(laid_out(value, layout)) for value, layout in zip(values, message.layouts, strict=True)]
        if self.channels.checks:
            dense.append(torch.tensor([*map(checksum, dense)], dtype=torch.int64, device=self.channels.device))
        with waiting(self.name, self.leaving(key)):
            self.sent[key] = [(self.channels.transfer(value, message.source, message.target), value) for value in dense]

    def release(self, key: str) -> None:
        for work, _ in self.sent.pop(key, ()):  # `join` may have waited for it
            self.wait(work, self.leaving(key))

    def leaving(self, key: str) -> str:
        return f"message {key} to rank {self.messages[key].target}, which"

    def reduce(self, key: str, gradients: Tensor) -> None:
        start = self.channels.sum_shards if key in self.sharded else self.channels.sum_over_replicas
        with waiting(self.name, self.summing(key)):
            self.reducing[key] = start(gradients)

    def reduced(self, key: str) -> None:
        self.wait(self.reducing.pop(key), self.summing(key))

    def summing(self, key: str) -> str:
        return f"the sum of {key} over the replicas, one of which"

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
        self.checksums.clear()
        self.reducing.clear()
        self.gathering.clear()


def flat(value: Tensor) -> Tensor:
    return value.as_strided((value.numel(),), (1,))


def checksum(value: Tensor) -> int:
    """The CRC-32 of a flat tensor's bytes: it finds every error of up to 32 bits in a row, and others but one in 2**32.
    On a GPU it waits for the device, and takes a copy in the host's memory."""
    return zlib.crc32(value.view(torch.uint8).cpu().numpy().data)
