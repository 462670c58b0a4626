"""Faults on purpose: one rank fails, in one way, at one place.

    from zbfx.testing import faults

    with faults.injected(faults.Kill(), faults.action("B1.0"), rank=1, after=2):
        train()  # rank 1 is killed in its third B of stage 1 and microbatch 0

Every process runs the same code; only the one that `rank` names has the fault. What the others do then is what a test
is to find out. Nothing of the library is changed outside of such blocks."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zbfx.arguments import count_from_zero
from zbfx.errors import ZbfxError, listed
from zbfx.plan import Kind
from zbfx.testing.places import BATCH, BIND, COMPILE, OPTIMIZER, SAVE, SEND, Spot, Work, action, every

__all__ = [
    "BATCH",
    "BIND",
    "COMPILE",
    "OPTIMIZER",
    "SAVE",
    "SEND",
    "ClockJump",
    "Corrupt",
    "DiskFull",
    "Hang",
    "InjectedError",
    "Kill",
    "Kind",
    "Leave",
    "Raise",
    "Slow",
    "Spot",
    "Stop",
    "Struck",
    "WrongBatch",
    "action",
    "every",
    "injected",
]

Arguments = tuple[Any, ...]


class Fault(Protocol):
    """A way to fail. `strike` runs the work of a place with its arguments, or other ones, or does not; what it leaves
    behind ends with `block`. `places`: the only ones that it can strike at; none: all."""

    @property
    def places(self) -> tuple[Spot, ...]: ...
    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any: ...


@dataclass(frozen=True)
class Anywhere:
    places: tuple[Spot, ...] = field(default=(), init=False, repr=False)


class InjectedError(ArithmeticError):
    """What `Raise` raises unless it is given another error."""


@dataclass(frozen=True)
class Raise(Anywhere):
    """An error: `torch.OutOfMemoryError("...")`, `KeyboardInterrupt()`, by default one that says "on purpose"."""

    error: BaseException = field(default_factory=lambda: InjectedError("on purpose"))

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        raise self.error


@dataclass(frozen=True)
class Kill(Anywhere):
    """The process ends at once: by SIGKILL, as by the system when memory runs out, or by another signal."""

    signal: int = signal.SIGKILL

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        os.kill(os.getpid(), self.signal)
        return work(*args)


@dataclass(frozen=True)
class Leave(Anywhere):
    """The process ends at once with a status, without its own doing (`os._exit`), as where C code calls `exit`."""

    status: int = 3

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        os._exit(self.status)


@dataclass(frozen=True)
class Hang(Anywhere):
    """The rank stands still for so many seconds; its other threads go on."""

    seconds: float

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        time.sleep(self.seconds)
        return work(*args)


@dataclass(frozen=True)
class Stop(Anywhere):
    """The whole process stands still for so many seconds, threads and all (SIGSTOP, then SIGCONT)."""

    seconds: float

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        again = f"import os, time; time.sleep({self.seconds!r}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
        block.enter_context(subprocess.Popen([sys.executable, "-S", "-c", again]))
        os.kill(os.getpid(), signal.SIGSTOP)
        return work(*args)


@dataclass(frozen=True)
class Slow(Anywhere):
    """The work takes so many seconds longer."""

    seconds: float

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        found = work(*args)
        time.sleep(self.seconds)
        return found


@dataclass(frozen=True)
class ClockJump(Anywhere):
    """The wall clock that Python reads (`time.time`) jumps by so many seconds, as when a host's clock is set."""

    seconds: float

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        before = time.time
        setattr(time, "time", lambda: before() + self.seconds)  # noqa: B010  mypy refuses the assignment
        block.callback(setattr, time, "time", before)
        return work(*args)


@dataclass(frozen=True)
class Corrupt:
    """One bit of a tensor that leaves for another process is flipped on its way. `bind(checksums=True)` finds it."""

    byte: int = 0
    bit: int = 0
    places: tuple[Spot, ...] = field(default=(SEND,), init=False, repr=False)

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        channels, value, *others = args
        return work(channels, self.flipped(value), *others)

    def flipped(self, value: Tensor) -> Tensor:
        damaged = value.clone()
        damaged.view(torch.uint8)[self.byte] ^= 1 << self.bit
        return damaged


@dataclass(frozen=True)
class DiskFull:
    """No file takes more than so many bytes, as on a disk that is nearly full (the limit RLIMIT_FSIZE)."""

    room_bytes: int = 0
    places: tuple[Spot, ...] = field(default=(SAVE,), init=False, repr=False)

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.room_bytes, before[1]))
        try:
            return work(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@dataclass(frozen=True)
class WrongBatch:
    """This rank gets its microbatches in another order than the others. `bind(check_batches=...)` finds it; the first
    batch is compared always."""

    places: tuple[Spot, ...] = field(default=(BATCH,), init=False, repr=False)

    def strike(self, work: Work, args: Arguments, block: ExitStack) -> Any:
        engine, rows = args
        if len(rows) < 2:
            raise ZbfxError(f"{self} changes the order of microbatches; found a batch of {len(rows)}")
        return work(engine, [*rows[1:], rows[0]])


@dataclass
class Struck:
    """How often the place was passed, and how often the fault struck: a test in which it never did shows nothing.
    `at_s`: when it first did, by `time.monotonic()`."""

    passed: int = 0
    times: int = 0
    at_s: float | None = None


@contextmanager
def injected(
    fault: Fault, at: Spot, *, rank: int | None = None, after: int = 0, times: int | None = 1
) -> Iterator[Struck]:
    """A block in which `fault` strikes at a place, in the process of this number in torch.distributed (None: in all).

    It strikes once the place was passed `after` times, `times` times in a row (None: from then on). Places are
    `action("B1.0")`, `every(Kind.F)`, `SEND`, `BATCH`, `OPTIMIZER`, `SAVE`, `BIND` and `COMPILE`. Counted are the calls
    of all pipelines in this process. A captured step passes its actions as it is captured, and not as it is replayed.
    Raises `ZbfxError` for a fault that cannot strike there."""
    if fault.places and at not in fault.places:
        raise ZbfxError(f"{fault} strikes at {listed(fault.places)}; found {at}")
    count_from_zero("after", after, "how often the place is passed before")
    struck = Struck()
    with ExitStack() as block:

        def around(work: Work, args: Arguments) -> Any:
            struck.passed += 1
            if struck.passed <= after or (times is not None and struck.times >= times):
                return work(*args)
            struck.times += 1
            struck.at_s = struck.at_s or time.monotonic()
            return fault.strike(work, args, block)

        if rank is None or rank == process_number():
            block.enter_context(at.hold(around))
        yield struck


def process_number() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
