"""The connections of the processes that are left once others have ended. A seat is a rank of a replica; each process
holds its own, and seats of the same rank whose processes are gone. In: the replicas, who is alive, a store. Out: a
`Crew`, and `SeatChannels` for each seat that this process holds, which threads use side by side.

Groups are made by gloo itself, each with keys of its own in the store: torch.distributed's `new_group` would wait for
the processes that are gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.comm.channels import GIVEN_UP, Channels
from zbfx.comm.place import Place, Replicas
from zbfx.comm.process_groups import MEETING, Bounded, Transfer
from zbfx.comm.together import waiting
from zbfx.errors import PipelineFault, ZbfxError

EVERYONE = "everyone"  # the wire of all that are left
LOOK_AGAIN_S = 0.05  # how often a thread that waits for another looks whether that one has failed


class Seat(NamedTuple):
    """A rank of a replica."""

    replica: int
    rank: int

    def __str__(self) -> str:
        return f"replica {self.replica}, rank {self.rank}"


Seats = Mapping[Seat, int]  # the process that holds each seat


def seats_of(replicas: Replicas, alive: Collection[int]) -> Seats:
    """Who holds which seat: each process its own, and of those of the same rank in other replicas the one with fewest
    seats those of processes that are gone. Raises `ZbfxError` where nobody can, or where a replica's batch is lost."""
    own = {Seat(d, r): process for d, replica in enumerate(replicas) for r, process in enumerate(replica)}
    held = {seat: process for seat, process in own.items() if process in alive}
    for seat in sorted(own.keys() - held.keys()):
        if not any(other.replica == seat.replica for other in own if own[other] in alive):
            raise ZbfxError(f"all processes of replica {seat.replica} have ended, and its batches are lost with them")
        peers = [own[other] for other in own if other.rank == seat.rank and own[other] in alive]
        if not peers:
            raise ZbfxError(f"all processes of rank {seat.rank} have ended, and its parameters are lost with them")
        counts = {process: sum(holder == process for holder in held.values()) for process in peers}
        held[seat] = min(peers, key=lambda process: (counts[process], process))
    return held


class Wire:
    """A gloo group of these processes, sorted; all of them make it at about the same time."""

    def __init__(self, name: str, processes: Collection[int], store: dist.Store, timeout: timedelta) -> None:
        self.processes, self.timeout = sorted(processes), timeout
        size, own = len(self.processes), self.processes.index(dist.get_rank())
        prefixed = dist.PrefixStore(name, store)
        self.group: Any = dist.ProcessGroupGloo(prefixed, own, size, min(timeout, MEETING))

    def send(self, value: Tensor, process: int, tag: int) -> Transfer:
        return Bounded(self.group.send([value], self.processes.index(process), tag), self.timeout)

    def receive(self, value: Tensor, process: int, tag: int) -> Transfer:
        return Bounded(self.group.recv([value], self.processes.index(process), tag), self.timeout)

    def add_up(self, value: Tensor) -> Transfer:
        return Bounded(self.group.allreduce([value], dist.ReduceOp.SUM, self.timeout), self.timeout)

    def give(self, value: Tensor, process: int) -> None:
        """The value of one process, on all."""
        Bounded(self.group.broadcast(value, self.processes.index(process), self.timeout), self.timeout).wait()

    def most(self, value: Tensor) -> None:
        """Overwrite each number with the largest of all."""
        Bounded(self.group.allreduce([value], dist.ReduceOp.MAX, self.timeout), self.timeout).wait()

    def meet(self) -> None:
        """Wait for all."""
        self.add_up(torch.zeros(1)).wait()

    def cut(self) -> None:
        """End the waits of all processes in this group: a receive that times out closes its connection."""
        for other in (k for k, process in enumerate(self.processes) if process != dist.get_rank()):
            with suppress(Exception):
                self.group.recv([torch.zeros(1)], other, GIVEN_UP).wait(timedelta(milliseconds=1))


@dataclass
class Joined:
    """What the seats of one rank in this process bring to one exchange, by replica, and what comes of it."""

    parts: dict[int, Tensor] = field(default_factory=dict)
    result: Tensor | None = None
    work: Transfer | None = None
    takers: int = 0  # seats that have what comes of it
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Crew:
    """The processes that are left, in one generation: from one death to the next. `pairs`: the (source, target) ranks
    between which messages go. Each process makes the wires that it is part of, in one order."""

    def __init__(
        self, generation: int, place: Place, seats: Seats, pairs: Collection[tuple[int, int]], channels: Channels
    ) -> None:
        self.place, self.seats, self.channels = place, seats, channels
        self.tag = 0  # of the messages of a step
        self.broken = threading.Event()
        self.alive = sorted(set(seats.values()))
        self.own = sorted(seat for seat, process in seats.items() if process == dist.get_rank())
        self.joined: dict[tuple[str, int], Joined] = {}
        self.lock = threading.Lock()
        wanted: dict[str, set[int]] = {EVERYONE: set(self.alive)}
        for rank in range(len(place.replicas[0])) if self.adopted else ():
            hosts = {seats[Seat(d, rank)] for d in range(len(place.replicas))}
            wanted |= {f"sums {rank}": hosts, f"values {rank}": hosts}
        for d in range(len(place.replicas)):
            wanted |= {f"{d}: {s} to {t}": {seats[Seat(d, s)], seats[Seat(d, t)]} for s, t in sorted(pairs)}
        wanted |= {f"batch of {seat}": {self.keeper(seat.replica), seats[seat]} for seat in self.adopted}
        store, timeout = channels.history.store, channels.timeout
        self.wires: dict[str, Wire] = {}
        for name, processes in wanted.items():
            if dist.get_rank() in processes and len(processes) > 1:
                self.wires[name] = Wire(f"generation {generation}, {name}", processes, store, timeout)

    @property
    def adopted(self) -> list[Seat]:
        """The seats of processes that are gone, in an order that all share."""
        return [s for s, process in sorted(self.seats.items()) if process != self.place.replicas[s.replica][s.rank]]

    def keeper(self, replica: int) -> int:
        """The process that gives a replica's batch to those that hold its adopted seats."""
        return next(process for process in self.place.replicas[replica] if process in self.alive)

    def hosts(self, rank: int) -> list[Seat]:
        """The seats of a rank that this process holds."""
        return [seat for seat in self.own if seat.rank == rank]

    def meet(self) -> None:
        if (wire := self.wires.get(EVERYONE)) is not None:
            with waiting(self.channels.name, "the other ranks or replicas at a step's end, one of which"):
                wire.meet()

    def are_alike(self, number: int) -> bool:
        """Whether all bring the same number."""
        bounds = torch.tensor([number, -number])
        if (wire := self.wires.get(EVERYONE)) is not None:
            with waiting(self.channels.name, "the other ranks or replicas, one of which"):
                wire.most(bounds)
        return bool(bounds[0] == -bounds[1])

    def cut(self) -> None:
        """End all waits of this process and of others on it."""
        self.broken.set()
        wires, self.wires = self.wires, {}
        for wire in wires.values():
            wire.cut()

    def entry(self, kind: str, number: int) -> Joined:
        with self.lock:
            return self.joined.setdefault((kind, number), Joined())

    def taken(self, kind: str, number: int, rank: int) -> None:
        """A seat of this rank has what comes of an exchange, which is let go of once all have."""
        with self.lock:
            joined = self.joined[kind, number]
            joined.takers += 1
            if joined.takers == len(self.hosts(rank)):
                del self.joined[kind, number]

    def come(self, event: threading.Event) -> None:
        """Wait for another thread of this process."""
        deadline = time.monotonic() + self.channels.timeout.total_seconds()
        while not event.wait(LOOK_AGAIN_S):
            if self.broken.is_set() or time.monotonic() > deadline:
                raise PipelineFault(f"{self.channels.name}: another seat of this process has failed", waited=True)


class SeatSum:
    """A sum over the replicas on its way. All seats of a rank in this process bring their part; the last one to do so
    adds them up, in the order of replicas, and begins to add what other processes have."""

    def __init__(self, crew: Crew, seat: Seat, number: int, value: Tensor) -> None:
        self.crew, self.seat, self.value = crew, seat, value
        self.key = f"sum of rank {seat.rank}", number
        self.entry = crew.entry(*self.key)
        with self.entry.lock:
            self.entry.parts[seat.replica] = value
            if len(self.entry.parts) < len(crew.hosts(seat.rank)):
                return
            first, *others = (self.entry.parts[d] for d in sorted(self.entry.parts))
            self.entry.result = first.clone()
            for other in others:
                self.entry.result.add_(other)
            wire = crew.wires.get(f"sums {seat.rank}")
            self.entry.work = None if wire is None else wire.add_up(self.entry.result)
            self.entry.done.set()

    def wait(self) -> None:
        self.crew.come(self.entry.done)
        with self.entry.lock:
            work, self.entry.work = self.entry.work, None
            if work is not None:
                work.wait()
            assert self.entry.result is not None, "made by the last seat"
            self.value.copy_(self.entry.result)
        self.crew.taken(*self.key, self.seat.rank)


class SeatChannels(Channels):
    """The connections of one seat among those that are left: what programs and engines ask of `Channels`. It makes no
    groups of torch.distributed, and has none of the calls between steps."""

    def __init__(self, crew: Crew, seat: Seat) -> None:
        before = crew.channels
        self.crew, self.seat, self.checks = crew, seat, before.checks
        self.place = Place((before.place.replicas,), 0, seat.replica, seat.rank)
        self.device, self.timeout, self.history = before.device, before.timeout, before.history
        self.rank, self.name = seat.rank, self.place.name
        self.lines, self.control = {}, None
        self.progress = self.overdue = None
        self.sums = self.stacks = 0

    @property
    def tag(self) -> int:
        return self.crew.tag

    def open(self, pairs: Collection[tuple[int, int]]) -> None:
        """All are open."""

    def transfer(self, value: Tensor, source: int, target: int) -> Transfer:
        name = f"{self.seat.replica}: {source} to {target}"
        wire = self.crew.wires.get(name)
        if wire is None:
            raise PipelineFault(f"{self.name}: the connections of this generation are cut", waited=True)
        other = self.crew.seats[Seat(self.seat.replica, target if source == self.rank else source)]
        return wire.send(value, other, self.tag) if source == self.rank else wire.receive(value, other, self.tag)

    def sum_over_replicas(self, value: Tensor) -> Any:
        self.sums += 1
        return SeatSum(self.crew, self.seat, self.sums, value)

    def from_replicas(self, value: Tensor) -> Tensor:
        self.stacks += 1
        crew, key = self.crew, (f"values of rank {self.rank}", self.stacks)
        entry = crew.entry(*key)
        with entry.lock:
            entry.parts[self.seat.replica] = value
            if len(entry.parts) == len(crew.hosts(self.rank)):
                entry.result = torch.stack(list(self.everyone(entry.parts, value)))
                entry.done.set()
        crew.come(entry.done)
        crew.taken(*key, self.rank)
        assert entry.result is not None, "made by the last seat"
        return entry.result

    def everyone(self, own: Mapping[int, Tensor], like: Tensor) -> Iterator[Tensor]:
        """The values of all replicas, in order."""
        wire = self.crew.wires.get(f"values {self.rank}")
        for d in range(len(self.place.replicas)):
            value = own[d].clone() if d in own else torch.empty_like(like)
            if wire is not None:
                with waiting(self.name, f"the losses of replica {d}, which"):
                    wire.give(value, self.crew.seats[Seat(d, self.rank)])
            yield value
