"""The connections of one pipeline: who talks to whom, and what becomes of the connections when a rank fails.
In: this process's `Place`, its device, a timeout. Out: `Channels`, which transports and steps call."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx._torch.distributed import group_store, join_shards, sum_shards
from zbfx.comm import process_groups
from zbfx.comm.copies import OTHER_STREAMS, CopyLine, Lines, Pair, drained, open_lines, room
from zbfx.comm.faults import Uncaught, known_fault, process_here
from zbfx.comm.history import History
from zbfx.comm.overdue import LAST_WORDS_S, Overdue, Progress, bound_exit, end_process, ends_within, say
from zbfx.comm.place import Place, Replicas
from zbfx.comm.process_groups import NCCL_BLOCKS, NCCL_REDUCTION_BLOCKS, Bounded, Library, Transfer, library_for
from zbfx.comm.together import waiting
from zbfx.errors import SAME_CALLS, PipelineFault, ZbfxError, listed

CLOSE_S = LAST_WORDS_S + 2  # how long letting go may take after a failure: the watches of `overdue` speak before
GIVEN_UP = 0x7FFFFFFF  # the tag of receives that are given up, to close a group's connections


class Carriers(NamedTuple):
    """What may carry messages between two ranks: copies into mapped memory (`zbfx.comm.copies`), process groups."""

    copies: bool
    groups: bool


TRANSPORTS = {"auto": Carriers(True, True), "copies": Carriers(True, False), "group": Carriers(False, True)}


class Channels:
    """The connections of one pipeline. `group` joins all its ranks. Where it has replicas, `family` joins all processes
    of all replicas, and `peers` those that run this rank; `control` joins the processes of `peers` once more, over
    gloo. Each direction of each pair of ranks has a line (`zbfx.comm.copies`) where their GPUs reach each other's
    memory, and a process group elsewhere.

    Every process of the world creates the groups of all pipelines, in one order. `open` creates and warms what connects
    pairs of ranks, on every rank in the same order. Communicators that are created lazily, inside a running pipeline,
    deadlock as soon as receives are posted ahead."""

    def __init__(
        self, place: Place, device: torch.device, timeout: timedelta, transport: str = "auto", *, checks: bool = False
    ) -> None:
        """`checks`: messages of steps travel with checksums, which their receivers compare."""
        self.checks = checks
        self.place, self.device, self.timeout, self.carriers = place, device, timeout, TRANSPORTS[transport]
        self.rank, self.name, self.library = place.rank, place.name, library_for(device)
        self.group = self.own_group(place.pipelines())
        self.family, self.peers, self.control, self.shards = self.group, None, None, None
        if len(place.replicas) > 1:
            self.family = self.own_group(processes_of(family) for family in place.families)
            lines = [line for family in place.families for line in zip(*family, strict=True)]
            self.peers = self.own_group(lines, NCCL_REDUCTION_BLOCKS)
            self.control = self.own_group(lines, library=Library.GLOO)
            self.sum_over_replicas(torch.zeros(1, device=device)).wait()
        self.aside, self.ahead = (
            self.own_group(map(processes_of, place.families), library=Library.GLOO) for _ in range(2)
        )
        self.model = self.family  # joins all processes that hold the model
        if place.shard_count > 1:
            self.shards = self.own_group(place.shard_lines(), library=Library.GLOO)
            self.model = self.own_group(place.models(), library=Library.GLOO)
        self.users: list[dist.ProcessGroup] = []  # groups that collectives of the model's own use
        differ, family = weakref.WeakMethod(self.differ), f"family {place.family}"
        self.history = History(self.name, group_store(self.model), differ, family, looks=place.shard_count > 1)
        weakref.finalize(self, self.history.end)
        weakref.finalize(self, self.history.leave)
        self.hook = Uncaught(weakref.WeakMethod(self.uncaught))
        weakref.finalize(self, self.hook.forget)
        self.progress, self.overdue = None, None
        if device.type == "cuda":
            allowed = f"bind(timeout_s=...) allows {timeout.total_seconds():g} s for a step, compiling included"
            self.progress = Progress(device)
            (here, _), found = process_here(), self.gather(process_here())
            near = {name: p for name, (place_of, p) in zip(place.names(), found, strict=True) if place_of == here}
            fault = partial(known_fault, self.history, near)
            self.overdue = Overdue(self.name, timeout, allowed, self.progress, fault)
            weakref.finalize(self, self.overdue.close)
        self.pairs: dict[Pair, dist.ProcessGroup] = {}
        self.lines: Lines = {}
        self.opened: set[Pair] = set()  # of all ranks, the same on each

    def own_group(
        self, parties: Iterable[Iterable[int]], blocks: int = NCCL_BLOCKS, library: Library | None = None
    ) -> Any:
        """Create the group of each party, all processes alike; returns that of this process, None if it has none."""
        own = None
        for party in map(sorted, parties):
            group = process_groups.new_group(party, self.timeout, library or self.library, blocks)
            own = group if dist.get_rank() in party else own
        return own

    def open(self, pairs: Collection[Pair]) -> None:
        """Open a channel for each (source, target) that has none. All ranks pass the same pairs."""
        new = sorted(set(pairs) - self.opened)
        self.opened.update(new)
        if new:
            self.gather(None)  # others may have to compile before they come here
        lined = self.open_lines(new) if new else set()
        for source, target in new:
            if (source, target) not in lined:
                group = self.own_group((pipeline[source], pipeline[target]) for pipeline in self.place.pipelines())
                if self.rank in (source, target):
                    self.pairs[source, target] = group
            if self.rank in (source, target):
                self.copy(torch.zeros(1, device=self.device), source, target)

    def open_lines(self, pairs: Sequence[Pair]) -> set[Pair]:
        """Open lines for the pairs that can have them, and return those pairs."""
        if self.device.type != "cuda":
            return set()
        own: Lines = {}
        lined: set[Pair] = set()
        if self.carriers.copies:
            own, lined = open_lines(pairs, self.place, self.device, "bind", room() - len(self.lines))
        self.lines |= own
        apart = listed(f"{source} and {target}" for source, target in sorted(set(pairs) - lined))
        if apart and (self.library is Library.GLOO or not self.carriers.groups):
            why = "NCCL takes one process for each GPU" if self.library is Library.GLOO else "transport='copies'"
            raise ZbfxError(
                f"{why}: messages are copies then. They need processes of one host that reach each other's memory, the "
                f"driver's bindings (cuda-bindings), and CUDA_DEVICE_MAX_CONNECTIONS, 8 by default, of {OTHER_STREAMS} "
                f"and one for each way between a rank and others; found ranks {apart} without"
            )
        return lined

    @property
    def tag(self) -> int:
        """The tag of messages in this call. It keeps messages of different calls apart: gloo ends a process that
        receives a longer message than it asked for."""
        return self.history.tag if self.library is Library.GLOO else 0

    def transfer(self, value: Tensor, source: int, target: int) -> Transfer:
        """Start to send a dense tensor, or to receive it; this rank is one of the two."""
        if (source, target) in self.lines:
            return self.lines[source, target].transfer(value)
        start, other = (dist.isend, target) if source == self.rank else (dist.irecv, source)
        work = start(value, self.place.processes[other], group=self.pairs[source, target], tag=self.tag)
        assert work is not None, "this process is one of the two"
        return Bounded(work, self.timeout) if self.library is Library.GLOO else work

    @contextmanager
    def lines_used(self) -> Iterator[list[CopyLine]]:
        """A list that holds, once the block is over, the lines on which anything was sent or received inside it."""
        before = {pair: line.transfers for pair, line in self.lines.items()}
        used: list[CopyLine] = []
        yield used
        used += [line for pair, line in self.lines.items() if line.transfers > before.get(pair, 0)]

    def abandon(self, values: Iterable[Tensor]) -> None:
        """Forget transfers of these values. Their memory is not used anew before the lines have come this far."""
        for value in values:
            for line in self.lines.values():
                value.record_stream(line.stream)

    def copy(self, value: Tensor, source: int, target: int) -> None:
        """Overwrite `value` on rank `target` with that of rank `source`, byte for byte; both ranks call it."""
        bits = value.contiguous().reshape(-1).view(torch.uint8)
        self.transfer(bits, source, target).wait()
        if self.rank == target:
            value.copy_(bits.view(value.dtype).view(value.shape))

    def from_rank(self, value: Tensor, source: int) -> Tensor:
        """The value of one rank of this pipeline, byte for byte, on all of them; on others `value` says its shape and
        dtype, and may be on the meta device."""
        bits = value if self.rank == source else torch.empty(value.shape, dtype=value.dtype, device=self.device)
        bits = bits.contiguous()
        with waiting(self.name, f"rank {source}, which"):
            dist.broadcast(bits.reshape(-1).view(torch.uint8), src=self.place.processes[source], group=self.group)
        return bits

    def sum_over_replicas(self, value: Tensor) -> dist.Work:
        """Start to sum a value of this rank over the replicas, in place."""
        work: dist.Work | None = dist.all_reduce(value, group=self.peers, async_op=True)
        assert work is not None, "this process is a member"
        return work

    def shard(self, flat: Tensor) -> Tensor:
        return flat.chunk(len(self.place.replicas))[self.place.replica]

    def sum_shards(self, flat: Tensor) -> dist.Work:
        """Start to sum a flat tensor over the replicas; only this replica's part of it becomes the sum."""
        assert self.peers is not None, "shards need replicas"
        return sum_shards(self.shard(flat), flat, self.peers)

    def join_shards(self, flat: Tensor) -> dist.Work:
        """Start to fill a flat tensor: each replica gives its own part."""
        assert self.peers is not None, "shards need replicas"
        return join_shards(flat, self.shard(flat), self.peers)

    def from_replicas(self, value: Tensor) -> Tensor:
        """This rank's value in every replica, stacked along a new first dimension."""
        values = [torch.empty_like(value) for _ in self.place.replicas]
        with waiting(self.name, "this rank of the other replicas, one of which"):
            dist.all_gather(values, value, group=self.peers)
        return torch.stack(values)

    def from_first_replica(self, value: Tensor) -> Tensor:
        value = value.clone()
        dist.broadcast(value, src=self.place.peers[0], group=self.peers)
        return value

    def reduce(self, value: Tensor, *, is_largest: bool, over_replicas: bool) -> None:
        """Overwrite `value` with its sum over all ranks and shards, and over the replicas if asked, or with the largest
        one."""
        operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        groups = [self.family if over_replicas else self.group, *([] if self.shards is None else [self.shards])]
        for group in groups:
            dist.all_reduce(value, op=operation, group=group)

    def barrier(self) -> None:
        """Wait until every rank's device has come this far, in all replicas."""
        with waiting(self.name, "the other ranks or replicas, one of which"):
            for process in (process for replica in self.place.replicas for process in replica):
                dist.broadcast(torch.zeros(1, device=self.device), src=process, group=self.family)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: object) -> list[Any]:
        """The picklable value of every rank of every replica, in order, on every one."""
        return self.gathered(value, self.family, [process for replica in self.place.replicas for process in replica])

    def gather_before_step(self, value: object) -> list[Any]:
        """As `gather`, between hosts alone: devices may still run the step before."""
        return self.gathered(value, self.ahead, [process for replica in self.place.replicas for process in replica])

    def gather_ranks(self, value: object) -> list[Any]:
        """The picklable value of every rank of this pipeline, in order, on every one."""
        return self.gathered(value, self.group, self.place.processes)

    def gather_peers(self, value: object) -> list[Any]:
        """The picklable value of this rank in every replica. It does not wait for the device."""
        return [value] if self.control is None else self.gathered(value, self.control, self.place.peers)

    def gather_shards(self, value: object) -> list[Any]:
        """The picklable value of every shard of this rank's stages. It does not wait for the device."""
        return [value] if self.shards is None else self.gathered(value, self.shards, self.place.shards)

    def gathered(self, value: object, group: Any, order: Sequence[int]) -> list[Any]:
        """The value of each process of a group, in the order of these processes: torch's order is its own."""
        found: list[Any] = [None] * dist.get_world_size(group)
        with waiting(self.name, "the other ranks or replicas, one of which"):
            dist.all_gather_object(found, (self.name, self.history.place, value), group=group)
        if len({place for _, place, _ in found}) > 1:
            places = listed(f"{name}: {place}" for name, place, _ in found)
            raise PipelineFault(f"ranks made different calls, but {SAME_CALLS}; found {places}")
        values = {p: value for p, (_, _, value) in zip(dist.get_process_group_ranks(group), found, strict=True)}
        return [values[process] for process in order]

    def gather_aside(self) -> Callable[[Any], list[Any]]:
        """A `gather` for another thread, in a gloo group of its own."""
        processes, group = processes_of(self.place.replicas), self.aside

        def gather(value: Any) -> list[Any]:
            found: list[Any] = [None] * len(processes)
            dist.all_gather_object(found, value, group=group)
            by_process = dict(zip(dist.get_process_group_ranks(group), found, strict=True))
            return [by_process[process] for process in processes]

        return gather

    def are_open(self) -> bool:
        """Whether torch.distributed still knows the groups of this pipeline."""
        if self.family is None or not dist.is_initialized():
            return False
        try:
            dist.get_backend(self.family)
        except ValueError:
            return False
        return True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The device must do all that the block launches within the timeout, or this process ends (`overdue`)."""
        if self.overdue is not None:
            self.overdue.begin()
        yield
        if self.progress is not None:
            self.progress.advance()

    def fail(self, error: BaseException, let_go: Callable[[], None] = lambda: None) -> str:
        """Tell the other ranks why this one fails, or learn why they do, and then the user; returns the first failure
        of all ranks. After that `let_go` of what is on its way, and close all connections, so that ranks that wait for
        this one fail at once. This process ends if that takes too long, as it may on a device that is broken."""
        self.history.close()
        if self.overdue is not None:
            self.overdue.close()
        said = f"{type(error).__name__}: {error}".removesuffix(": ")  # a KeyboardInterrupt says nothing
        waited = isinstance(error, PipelineFault) and error.waited
        own = str(error) if isinstance(error, PipelineFault) else f"{self.name}: {said}"
        first = self.history.first_fault(own, waited=waited)
        say(first)
        if self.device.type == "cuda":
            bound_exit()
        traceback.clear_frames(error.__traceback__)  # pending operations in their locals keep connections open

        def abandon() -> None:
            lines, self.lines = self.lines, {}  # other ranks may still write to their memory: it is never freed
            with suppress(Exception):  # a device that is broken for good waits for nothing
                if lines and self.overdue is not None:
                    self.overdue.failed(first, drained(lines.values()))
            with suppress(Exception):
                let_go()
            self.give_up()
            self.close()

        if not ends_within(CLOSE_S, abandon):
            end_process(f"{self.name} ends, for it has failed, and its connections do not close. {first}")
        return first

    def uncaught(self, error: BaseException) -> None:
        """An exception ends this process, outside of any call: the other ranks hear of it."""
        if not self.history.closed:
            said = f"{type(error).__name__}: {error}".removesuffix(": ")
            self.fail(PipelineFault(f"{self.name}, outside of its calls: {said}"))

    def close(self) -> None:
        self.history.close()
        self.history.leave()
        self.hook.forget()
        if self.overdue is not None:
            self.overdue.close()
        lines, self.lines = self.lines, {}
        for line in lines.values():
            line.disconnect()
        if lines and self.history.all_arrive("the end", len(self.place.names())):
            for line in lines.values():
                line.free()
        self.cut()

    def cut(self) -> None:
        """Close all groups: who waits in one of them waits no longer."""
        for group in self.groups():
            with suppress(Exception):  # the others are closed all the same
                dist.destroy_process_group(group)
        self.pairs.clear()
        self.group = self.family = self.peers = self.control = self.shards = self.aside = self.model = None
        self.users = []

    def groups(self) -> list[dist.ProcessGroup]:
        groups = [
            *self.pairs.values(),
            self.group,
            self.peers,
            self.control,
            self.shards,
            self.aside,
            self.model,
            self.family,
        ]
        return list(dict.fromkeys(group for group in groups if group is not None)) if self.are_open() else []

    def differ(self, reason: str) -> None:
        """Other ranks made other calls, or a shard has failed: end this rank's waits in gloo groups. Called from
        another thread. The waits of all ranks end with these, since a rank that fails closes its connections. What
        waits on a GPU is ended by `zbfx.comm.overdue`."""
        self.history.first_fault(reason)
        self.give_up()

    def give_up(self) -> None:
        """End the waits of all processes in gloo groups of this pipeline: a receive that times out closes its
        connection. To let go of a group does not, while a frame of an error still holds what waits in it."""
        for group in (*self.groups(), *self.users):
            for other in others_in(group):
                with suppress(Exception):
                    work = dist.irecv(torch.zeros(1), src=other, group=group, tag=GIVEN_UP)
                    assert work is not None, "this process is a member"
                    work.wait(timedelta(milliseconds=1))


def others_in(group: dist.ProcessGroup) -> list[int]:
    """The other processes of a gloo group; none where it is gone, or of another library."""
    with suppress(Exception):
        if dist.get_backend(group) == Library.GLOO.value:
            return [process for process in dist.get_process_group_ranks(group) if process != dist.get_rank()]
    return []


def processes_of(replicas: Replicas) -> list[int]:
    """The processes of all replicas, by replica and rank."""
    return [process for replica in replicas for process in replica]
