"""Training goes on when processes end (`bind(survive=True)`, `docs/faults.md`). In: a step's batch. Out: its loss, from
the processes that are left: those of the same rank compute for the ones that are gone. The step that failed runs again
from the gradients and buffers before it, with the same batch and random numbers, unless somebody has returned from it:
then all who are left have computed all of it, for a step ends with a meeting of all."""

from __future__ import annotations

import json
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Thread
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbfx.comm.channels import Channels
from zbfx.comm.faults import is_gone, process_here
from zbfx.comm.overdue import say
from zbfx.comm.place import Place
from zbfx.comm.process_groups import Transfer
from zbfx.comm.seats import Crew, Seat, SeatChannels, seats_of
from zbfx.comm.together import waiting
from zbfx.compiled import Compiled
from zbfx.errors import SAME_CALLS, InputError, PipelineFault, ZbfxError, listed
from zbfx.graphs import Role
from zbfx.modes import Modes
from zbfx.runtime.agreement import take_gradient_dtypes
from zbfx.runtime.buffer_copies import BufferCopies, buffers_written
from zbfx.runtime.captured import Launched
from zbfx.runtime.engine import Batch, BatchResults, Engine, rank_engine
from zbfx.runtime.engines import Engines
from zbfx.runtime.options import BindOptions
from zbfx.runtime.ranks import OneOfMany
from zbfx.runtime.runner import Tensors
from zbfx.runtime.verdict import snapshot

TRIES = 3  # to connect those that are left
LOOK_FOR_OTHERS_S = 0.05
ONE_HOST = "survive=True finds out by the system's table of processes who has ended"


class Surviving(Protocol):
    """What survival asks of the worker of a step."""

    ranks: Any
    engines: Engines
    launch: Launched
    modes: Modes
    fault: str | None

    @property
    def engine(self) -> Engine: ...
    @property
    def tensors(self) -> Tensors: ...
    @property
    def count(self) -> int: ...
    def seed_of_step(self) -> int: ...
    def compute(self, engine: Engine, rows: Sequence[Sequence[Tensor]]) -> BatchResults: ...
    def fail(self, error: BaseException) -> None: ...
    def drop(self) -> None: ...


class Standing(NamedTuple):
    """Where a process is: at a step, by its number, which it has computed or not; or it will make none from that on."""

    step: int
    is_finished: bool
    has_left: bool


class Survivors(OneOfMany):
    """This process among those that are left. Calls beside training steps need all ranks, and are refused."""

    def __init__(self, first: OneOfMany, channels: SeatChannels, generation: int) -> None:
        super().__init__(channels)
        self.first, self.crew, self.generation = first, channels.crew, generation

    @property
    def are_open(self) -> bool:
        return True

    def begin(self, call: str, *, batch: bool = False) -> None:
        raise ZbfxError(
            f"{call}: a process of this pipeline has ended. Those that are left train on (step(...), run_split), and "
            f"each has its own parameters (step.named_parameters()). For all else start again from a checkpoint"
        )

    def given(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """The survivors compare their shapes themselves."""

    def admit(self, take: Callable[[], Batch], *, apart: bool = False) -> Batch:
        return take()

    def all_refuse(self) -> bool:
        self.refusals += 1
        place = f"refused {self.refusals} of generation {self.generation}"
        return self.channels.history.all_arrive(place, len(self.crew.alive))

    def fail(self, error: BaseException, let_go: Callable[[], None]) -> str | None:
        return self.first.fail(error, let_go)

    def leave(self) -> None:
        """Nobody waits for this process."""

    def close(self) -> None:
        self.crew.cut()
        self.first.close()


class Survival:
    """Runs training steps for the worker of a bound step, and goes on with fewer processes."""

    def __init__(self, worker: Surviving, channels: Channels) -> None:
        self.worker, self.channels, self.place = worker, channels, channels.place
        self.generation = 0
        processes = channels.gather(process_here())
        hosts = {host for host, _ in processes}
        if len(hosts) > 1:
            raise ZbfxError(f"{ONE_HOST}: all are on one host; found {listed(sorted(hosts))}")
        order = [process for replica in self.place.replicas for process in replica]
        self.numbers = {process: number for process, (_, number) in zip(order, processes, strict=True)}
        self.crew = Crew(0, self.place, seats_of(self.place.replicas, order), (), channels)
        self.adopted: list[tuple[Seat, Engine]] = []
        self.own, self.buffers = Seat(self.place.replica, self.place.rank), BufferCopies()

    def train(self, take: Callable[[], Batch]) -> BatchResults:
        """The results of one training step. Raises `PipelineFault` where no process can take over."""
        worker, results, batch = self.worker, None, None
        before = snapshot(worker.engine.parameters)
        self.buffers.begin(worker.engine, self.own, len(self.place.replicas))
        while True:
            try:
                batch = batch or self.admitted(take)
                if results is None:
                    self.compare(batch[1])
                    results = self.computed(batch[1])
                self.crew.meet()
                self.buffers.end()
                return results
            except InputError:
                raise
            except PipelineFault as error:
                if not error.waited:
                    self.end(error)
                if self.is_over(error, is_finished=results is not None):
                    assert results is not None, "as this process told the others"
                    self.buffers.end()
                    return results
                results = None
                self.buffers.give(worker.engine, self.own, is_over=False)
                for name, parameter in worker.engine.parameters.items():
                    kept = before[name]
                    parameter.grad = None if kept is None else kept.clone()
            except BaseException as error:
                self.end(error)

    def loaded(self) -> None:
        """Buffers have values of a checkpoint, those of each replica. Collective."""
        self.buffers.take(self.worker.engine)
        self.buffers.end()

    def end(self, error: BaseException) -> NoReturn:
        """No further step can run; the others hear why."""
        self.crew.cut()
        self.worker.fail(error)
        if not isinstance(error, Exception):
            raise error
        raise PipelineFault(self.worker.fault or str(error)) from error

    def admitted(self, take: Callable[[], Batch]) -> Batch:
        """A batch that all have taken. Raises `InputError` for what all refuse."""
        worker = self.worker
        try:
            return worker.ranks.admit(take)
        except PipelineFault:
            raise
        except Exception as error:
            if not isinstance(error, InputError) or not worker.ranks.all_refuse():
                self.end(error)
            raise

    def compare(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Raise `PipelineFault` unless all are at the same step, with batches of the same shapes. All do this in every
        attempt: one may have taken its batch before the last failed, and another not."""
        shapes = [tuple(tensor.shape) for row in rows for tensor in row]
        if not self.crew.are_alike(zlib.crc32(repr((self.worker.count, shapes)).encode())):
            raise PipelineFault(f"{SAME_CALLS}, with batches of the same shapes; found others")

    def computed(self, rows: Sequence[Sequence[Tensor]]) -> BatchResults:
        """What this process's own seat makes of its batch; meanwhile its adopted seats run, each in a thread."""
        worker, self.crew.tag = self.worker, self.worker.count & 0xFFFF
        batches, errors = self.batches(rows), list[BaseException]()
        threads = [Thread(target=self.run, args=(adopted, batches[seat], errors)) for seat, adopted in self.adopted]
        for thread in threads:
            thread.start()
        try:
            results = worker.compute(worker.engine, rows)
            self.buffers.take(worker.engine)
        except BaseException:
            self.crew.cut()
            raise
        finally:
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return results

    def run(self, adopted: Engine, rows: Sequence[Sequence[Tensor]], errors: list[BaseException]) -> None:
        """What an adopted seat does in a step. Its sums of gradients end up in those of this process's own seat."""
        worker = self.worker
        try:
            with worker.modes.fixed():
                adopted.weigh(rows)
                worker.launch.run(adopted, rows, worker.seed_of_step(), worker.count, lambda: None)
                self.buffers.take(adopted)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            errors.append(error)
            self.crew.cut()
        for parameter in adopted.parameters.values():
            parameter.grad = None

    def batches(self, rows: Sequence[Sequence[Tensor]]) -> Mapping[Seat, Sequence[Sequence[Tensor]]]:
        """The batches of the adopted seats that this process holds. It gives its own to those that need it."""
        crew, own = self.crew, dist.get_rank()
        specs = self.worker.engine.pipe.signature.tensors
        found: dict[Seat, list[list[Tensor]]] = {}
        on_way: list[tuple[Transfer, Tensor, Tensor | None]] = []
        who = "the batch of another replica, a process of which"
        for seat in crew.adopted:
            keeper, host = crew.keeper(seat.replica), crew.seats[seat]
            if own not in (keeper, host):
                continue
            names, wire = inputs_of(self.worker.engine.pipe, seat.rank), crew.wires[f"batch of {seat}"]
            if own == host:
                found[seat] = [[torch.empty_like(tensor) for tensor in row] for row in rows]
            for row in found.get(seat, rows):
                for tensor in (tensor for spec, tensor in zip(specs, row, strict=True) if spec.name in names):
                    bits = tensor.contiguous().reshape(-1).view(torch.uint8)
                    with waiting(self.channels.name, who):
                        if own == host:
                            on_way.append((wire.receive(bits, keeper, crew.tag), bits, tensor))
                        else:
                            on_way.append((wire.send(bits, host, crew.tag), bits, None))
        with waiting(self.channels.name, who):
            for work, bits, target in on_way:
                work.wait()
                if target is not None:
                    target.copy_(bits.view(target.dtype).view(target.shape))
        return found

    def is_over(self, error: PipelineFault, *, is_finished: bool) -> bool:
        """Connect those that are left, after this process has waited for another in vain. Returns whether the step is
        over: all have computed all of it. Ends this pipeline, on all, where nobody has ended or nobody can take
        over."""
        begun, worker = time.monotonic(), self.worker
        for raised in (error, error.__cause__):
            if raised is not None:
                traceback.clear_frames(raised.__traceback__)  # pending operations in their locals hold connections
        worker.drop()
        for _, adopted in self.adopted:
            adopted.runners[0].transport.drop()
        self.crew.cut()
        self.channels.history.close()
        self.channels.give_up()
        self.channels.cut()
        tries = 0  # a machine may be too slow to connect in time
        while True:
            self.generation += 1
            try:
                found = self.meeting(error, is_finished, again=tries > 0)
                is_over = self.decided(found, error)
                left = [process for process, standing in found.items() if not standing.has_left]
                if len(left) == len(found):
                    self.connect(left, is_over=is_over)
                break
            except PipelineFault as fault:
                self.end(fault)
            except ZbfxError as refusal:
                self.end(PipelineFault(f"{refusal}. {error}"))
            except RuntimeError:  # another has ended meanwhile, or was late
                tries += 1
                self.crew.cut()
                if tries == TRIES:
                    self.end(error)
        if min(found) == dist.get_rank() and self.crew.adopted:
            again = "is over" if is_over else "runs again"
            after_s = time.monotonic() - begun
            say(f"{'; '.join(self.replacements())}. Step {worker.count + 1} {again}, after {after_s:.1f} s")
        return is_over

    def decided(self, found: Mapping[int, Standing], error: PipelineFault) -> bool:
        """Whether the step of this process is over. Raises where another has left before it."""
        number = self.worker.count + 1
        here = [standing for standing in found.values() if standing.step == number]
        is_over = any(s.step > number for s in found.values()) or all(s.is_finished for s in here)
        if not is_over and any(standing.has_left for standing in found.values()):
            raise error
        return is_over

    def replacements(self) -> Iterator[str]:
        """Who computes for whom."""
        names = zip((p for replica in self.place.replicas for p in replica), self.place.names(), strict=True)
        name_of = dict(names)
        for seat in self.crew.adopted:
            yield f"{seat} has ended, and {name_of[self.crew.seats[seat]]} computes for it"

    def leave(self) -> None:
        """This process makes no further step; others may still be at the end of its last."""
        self.channels.history.store.set(f"{dist.get_rank()} trains no more", f"{self.worker.count + 1} 0 0")

    def meeting(self, error: PipelineFault, is_finished: bool, *, again: bool) -> dict[int, Standing]:
        """Who is left, or has left, and where each is. The same on all. Raises `error` where all are there, unless one
        of them asks to connect `again`."""
        store, stem, own = self.channels.history.store, f"generation {self.generation}", dist.get_rank()
        store.set(f"{stem} at {own}", f"{self.worker.count + 1} {int(is_finished)} {int(again)}")
        before, deadline = set(self.crew.alive), time.monotonic() + self.channels.timeout.total_seconds()
        while True:
            gone = {process for process in before if is_gone(self.numbers[process])}
            left = {process for process in before if store.check([f"{process} trains no more"])}
            there = {process for process in before - left - gone if store.check([f"{stem} at {process}"])}
            if there | left | gone == before:
                break
            fault = self.channels.history.known_fault()
            if fault is not None or time.monotonic() > deadline:
                raise PipelineFault(fault or str(error)) from error
            time.sleep(LOOK_FOR_OTHERS_S)
        chosen = store.compare_set(f"{stem} members", "", json.dumps([sorted(there), sorted(left)]))
        there, left = map(set, json.loads(chosen.decode()))
        if own not in there:
            raise error
        told = {process: store.get(f"{stem} at {process}").decode().split() for process in sorted(there)}
        told |= {process: store.get(f"{process} trains no more").decode().split() for process in sorted(left)}
        if there == before and not any(int(asks) for _, _, asks in told.values()):
            raise error
        return {
            process: Standing(int(number), bool(int(finished)), process in left)
            for process, (number, finished, _) in told.items()
        }

    def connect(self, left: Collection[int], *, is_over: bool) -> None:
        """The connections of those that are left, and engines for the seats that this process holds."""
        worker, place = self.worker, self.place
        pipe, seats = worker.engine.pipe, seats_of(place.replicas, left)
        self.crew = Crew(self.generation, place, seats, pipe.message_pairs, self.channels)
        assert isinstance(worker.ranks, OneOfMany), "bound"
        first = worker.ranks.first if isinstance(worker.ranks, Survivors) else worker.ranks
        worker.ranks = worker.engines.ranks = Survivors(first, SeatChannels(self.crew, self.own), self.generation)
        worker.engines.replace_first(pipe)
        self.adopted = [(seat, self.adopt(seat)) for seat in self.crew.own if seat != self.own]
        for seat, engine in self.adopted:
            self.buffers.give(engine, seat, is_over=is_over)

    def adopt(self, seat: Seat) -> Engine:
        """An engine for another replica's seat of this process's rank, on the parameters of this process. Gradients,
        and buffers that forwards write, have memory of their own."""
        worker = self.worker
        pipe, tensors = worker.engine.pipe, worker.tensors
        own = {name: shadow(tensor) for name, tensor in tensors.named.items()}
        own |= {name: torch.empty_like(tensor) for name, tensor in buffers_written(worker.engine).items()}
        engine = rank_engine(replace(pipe), Tensors(own, tensors.constants), SeatChannels(self.crew, seat))
        take_gradient_dtypes(pipe, engine)
        return engine


def shadow(tensor: Tensor) -> Tensor:
    """A tensor of the same memory, with a gradient of its own."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    return tensor


def inputs_of(pipe: Compiled, rank: int) -> set[str]:
    """The tensors of a microbatch that a rank's stages read."""
    stages = (stage for stage in pipe.stages if pipe.placement[stage.index] == rank)
    return {name for stage in stages for phase in stage.phases.values() for name in phase.port_names(Role.INPUT)}


def refuse_survival(pipe: Compiled, place: Place, options: BindOptions) -> None:
    """Raises `ZbfxError` for what does not go on without a process that has ended."""
    wrong = {
        "one replica": len(place.replicas) == 1,
        "shards of a model, or pipelines that train apart": len(place.families) > 1,
        f"zero={options.zero}, where each process has a part of the optimizer's state alone": bool(options.zero),
        "a GPU, whose waits nobody can end": options.device != "cpu",
        f"backend={pipe.options.backend!r}": pipe.options.runs.compiles,
        f"on_nonfinite={options.on_nonfinite!r}": options.checks,
        f"on_new_shape={options.on_new_shape!r}": not options.refuses_shapes,
        f"check_batches={options.check_batches}": bool(options.check_batches),
    }
    found = [text for text, is_so in wrong.items() if is_so]
    if found:
        raise ZbfxError(
            f"survive=True needs replicas of one pipeline on CPUs of one host, and the default of all else that bind "
            f"does in a step; found {'; '.join(found)}"
        )
