"""Ranks as they run on GPUs, without any: what hosts launch, on which streams, and who waits for whom.

Every launch, every transfer and every wait of a host is an event that comes after others. A rank's program runs once
for each step, through the transport that it has on GPUs. Nothing depends on timing: all events can happen, unless some
come after each other in a circle. Then ranks wait for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import torch
from torch import Tensor

MAIN, BESIDE = "main", "beside"  # streams; a channel has one at each end, named by its ranks
Pair = tuple[int, int]  # source, target
Stream = str | Pair


class End(NamedTuple):
    """A transfer on one rank: the events at which it begins and ends there."""

    begun: int
    ended: int
    elements: int


@dataclass
class Events:
    """`after[event]`: what comes before it. `ends[pair, sends]`: the transfers of a channel, in order.
    `meetings[rank]`: where its host meets all others.

    A tensor of at most `inbox` elements is sent before it is posted, if the one before it on the channel was received;
    larger ones wait, as may all of NCCL's. `lines`: graphs begin once all channels that they work on are free, and hold
    them until they end.
    """

    inbox: int
    lines: bool
    after: list[set[int]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    ends: dict[tuple[Pair, bool], list[End]] = field(default_factory=lambda: defaultdict(list))
    meetings: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, label: str, *after: int | None) -> int:
        self.after.append({event for event in after if event is not None})
        self.labels.append(label)
        return len(self.after) - 1

    def circle(self) -> list[str]:
        """Events that wait for each other; none if all can happen."""
        for pair in {pair for pair, _ in self.ends}:
            self.connect(self.ends[pair, True], self.ends[pair, False])
        for together in zip(*self.meetings.values(), strict=True):
            met = self.add("all have met", *together)
            for event in together:
                self.after[event + 1].add(met)  # whoever goes on from there
        try:
            TopologicalSorter(dict(enumerate(self.after))).prepare()
        except CycleError as error:
            return [self.labels[event] for event in error.args[1]]
        return []

    def connect(self, sends: list[End], receives: list[End]) -> None:
        assert [end.elements for end in sends] == [end.elements for end in receives], "both in one order"
        free = 0  # the first transfer of a channel finds the inbox empty
        for send, receive in zip(sends, receives, strict=True):
            self.after[receive.ended].add(send.begun)
            if send.elements <= self.inbox:
                self.after[receive.ended].add(send.ended)
                self.after[send.ended].add(free)
            else:
                self.after[send.ended].add(receive.begun)
            free = receive.ended


class Transfer:
    """A tensor on its way, or its record in a graph."""

    def __init__(self, device: Device, pair: Pair, elements: int, *, sends: bool) -> None:
        self.device, self.pair, self.elements, self.sends = device, pair, elements, sends

    def wait(self) -> None:
        self.device.do(self, waits=True)


Tape = list[tuple[Transfer, bool, Stream]]


class Device:
    """A rank's host, and the streams of its GPU; for a transport, the channels to other ranks."""

    device = torch.device("cpu")
    checks = False  # checksums of messages

    def __init__(self, events: Events, rank: int) -> None:
        self.events, self.rank, self.name = events, rank, f"rank {rank}"
        self.host = events.add(f"{self.name} begins")
        self.last: dict[Stream, int] = {}
        self.stream: Stream = MAIN
        self.tape: Tape | None = None
        self.arrivals: dict[Transfer, int] = {}

    def transfer(self, value: Tensor, source: int, target: int) -> Transfer:
        return self.begin(Transfer(self, (source, target), value.numel(), sends=source == self.rank))

    def begin(self, transfer: Transfer) -> Transfer:
        self.do(transfer, waits=False)
        return transfer

    def do(self, transfer: Transfer, *, waits: bool) -> None:
        if self.tape is not None:
            self.tape.append((transfer, waits, self.stream))
        else:
            self.launch(transfer, waits, self.stream, self.last, self.arrivals, self.host)

    def launch(
        self,
        transfer: Transfer,
        waits: bool,
        stream: Stream,
        last: dict[Stream, int],
        arrivals: dict[Transfer, int],
        launched: int,
    ) -> None:
        name = f"{self.name}, {transfer.elements} elements over {transfer.pair}"
        if waits:
            last[stream] = self.events.add(f"{name}: waited", launched, last.get(stream), arrivals[transfer])
            return
        begun = self.events.add(f"{name}: begin", launched, last.get(stream), last.get(transfer.pair))
        ended = arrivals[transfer] = last[transfer.pair] = self.events.add(f"{name}: end", begun)
        self.events.ends[transfer.pair, transfer.sends].append(End(begun, ended, transfer.elements))

    @contextmanager
    def capturing(self) -> Iterator[Tape]:
        tape = self.tape = []
        yield tape
        self.tape = None

    def replay(self, tape: Tape) -> None:
        pairs = {transfer.pair for transfer, *_ in tape}
        before: dict[Stream, int] = {pair: self.last[pair] for pair in pairs if pair in self.last}
        free = before.values() if self.events.lines else ()
        root = self.events.add(f"{self.name}: a graph begins", self.host, self.last.get(MAIN), *free)
        last: dict[Stream, int] = {MAIN: root}
        if not self.events.lines:
            last.update(before)
        arrivals: dict[Transfer, int] = {}
        for transfer, waits, stream in tape:
            self.launch(transfer, waits, stream, last, arrivals, root)
        end = self.events.add(f"{self.name}: a graph ends", *last.values())
        self.last |= dict.fromkeys(pairs, end) if self.events.lines else last
        self.last[MAIN] = end

    def wait_for(self, *streams: Stream) -> None:
        """The host waits for these streams; for all if none are given."""
        chosen = [self.last.get(stream) for stream in streams or tuple(self.last)]
        self.host = self.events.add(f"{self.name}: the host waits", self.host, *chosen)

    def meet(self) -> None:
        """The hosts of all ranks wait for each other."""
        self.events.meetings[self.rank].append(self.events.add(f"{self.name}: the host meets others", self.host))
        self.host = self.events.add(f"{self.name}: the host has met others", self.events.meetings[self.rank][-1])
