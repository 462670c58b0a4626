"""Messages between GPUs of one host by their copy engines: a wait takes nothing from the multiprocessors.
In: pairs of ranks. Out: for each pair a `CopyLine`, which sends or receives dense tensors.
A receive of NCCL that waits keeps its thread blocks on the device, and kernels made for all multiprocessors run much
longer beside them: on an H200 the phases of a GPT take 7 to 25 % longer beside two such blocks. Here the sender copies
into an inbox, memory of the receiver that both processes map, and streams wait by themselves for words in device
memory. All of it can be captured in a CUDA graph.
The words: the receiver's say which slots of its inbox are full, the sender's which are free. Whoever has waited for a
word resets it, and every tensor starts at the first slot: every replay of a graph finds the words as the first one did.
CUDA driver API: stream memory operations, inter-process memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from platform import node
from typing import Any

import torch
from torch import Tensor

from zbfx.comm.place import Place
from zbfx.comm.together import exchange

try:
    from cuda.bindings import driver
except ImportError:  # they come with PyTorch's wheels for CUDA, not with every build
    driver = None

SLOTS = 2  # of an inbox: of a large tensor, one slot is filled while the other is emptied
SLOT_BYTES = 2**24
WORD_BYTES = 4
WORDS_BYTES = 256  # in front of the slots
INBOX_BYTES = WORDS_BYTES + SLOTS * SLOT_BYTES
EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
OTHER_STREAMS = 4  # that work beside lines: compute, the second stream, NCCL's, an optimizer's

Pair = tuple[int, int]  # ranks: source, target
Lines = dict[Pair, "CopyLine"]
Address = tuple[str, bytes]  # the host, and what another process there needs to map memory of this one


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


def driver_value(result: tuple[Any, ...]) -> Any:
    """The value that a call of the driver returns beside its error code."""
    error, *values = result
    if int(error) != 0:
        raise DriverError(f"{error.name} ({int(error)})")
    return values[0] if values else None


@cache
def host() -> str:
    """The name of this machine and of its current boot."""
    return f"{node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def room() -> int:
    """How many lines a process can have. Each needs a queue of the device to itself: a line that waits stops its queue,
    and every stream in it. There are CUDA_DEVICE_MAX_CONNECTIONS queues, 8 by default."""
    return int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")) - OTHER_STREAMS


@dataclass(frozen=True, slots=True)
class Arrival:
    """The end of a transfer on its stream."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class CopyLine:
    """One end of a channel between two processes of one host, and the stream on which it works. Raises `DriverError`
    where the device has no memory left, or shares none."""

    def __init__(self, device: torch.device, *, sends: bool) -> None:
        if driver is None:
            raise DriverError("cuda.bindings is not installed")
        self.device, self.sends = device, sends
        with torch.cuda.device(device):
            # PyTorch hands out the same few streams again and again: one that waits for another rank is used alone.
            self.handle = driver_value(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            self.own = int(driver_value(driver.cuMemAlloc(WORDS_BYTES if sends else INBOX_BYTES)))
            driver_value(driver.cuMemsetD32(self.own, int(sends), SLOTS))  # all slots are free
            torch.cuda.synchronize(device)
            self.address = host(), bytes(driver_value(driver.cuIpcGetMemHandle(self.own)).reserved)
        self.stream = torch.cuda.ExternalStream(int(self.handle), device)
        self.other = 0
        self.transfers = 0
        self.noted = torch.zeros((), dtype=torch.int32, pin_memory=True)  # allocating it later may wait for the device

    def connect(self, address: Address | None) -> bool:
        """Map the other end's memory. False: this process cannot."""
        if address is None or address[0] != host():
            return False
        handle = driver.CUipcMemHandle()
        handle.reserved = address[1]
        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        try:
            with torch.cuda.device(self.device):
                self.other = int(driver_value(driver.cuIpcOpenMemHandle(handle, lazily)))
        except DriverError:
            return False
        return True

    def transfer(self, value: Tensor) -> Arrival:
        """Send or receive a dense tensor once the current stream has come here. It must live until it has arrived."""
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            bytes_left, address, slot = value.numel() * value.element_size(), value.data_ptr(), 0
            while bytes_left > 0:
                size = min(bytes_left, SLOT_BYTES)
                word, box = slot * WORD_BYTES, WORDS_BYTES + slot * SLOT_BYTES
                driver_value(driver.cuStreamWaitValue32(self.handle, self.own + word, 1, EQUAL))
                driver_value(driver.cuStreamWriteValue32(self.handle, self.own + word, 0, 0))
                target, source = (self.other + box, address) if self.sends else (address, self.own + box)
                driver_value(driver.cuMemcpyDtoDAsync(target, source, size, self.handle))
                driver_value(driver.cuStreamWriteValue32(self.handle, self.other + word, 1, 0))
                bytes_left, address, slot = bytes_left - size, address + size, (slot + 1) % SLOTS
            self.transfers += 1
            return Arrival(self.stream.record_event(), self.device)

    def note(self) -> None:
        """Make `noted` 1 once the line's stream has come this far."""
        driver_value(driver.cuStreamWriteValue32(self.handle, self.noted.data_ptr(), 1, 0))

    def disconnect(self) -> None:
        """Unmap the other end's memory. Its owner must not free it before."""
        if self.other:
            with torch.cuda.device(self.device):
                driver_value(driver.cuIpcCloseMemHandle(self.other))
            self.other = 0

    def free(self) -> None:
        """Free this end's memory, after the other process has unmapped it."""
        with torch.cuda.device(self.device):
            driver_value(driver.cuMemFree(self.own))
            driver_value(driver.cuStreamDestroy(self.handle))


def new_line(device: torch.device, *, sends: bool) -> CopyLine | None:
    """An end of a channel; None if the device has no memory for it, not even once PyTorch's cache is emptied."""
    for _ in range(2):
        try:
            return CopyLine(device, sends=sends)
        except DriverError:
            torch.cuda.empty_cache()
    return None


def open_lines(
    pairs: Sequence[Pair], place: Place, device: torch.device, what: str, most: int
) -> tuple[Lines, set[Pair]]:
    """Open lines for pairs of ranks. Returns this process's ends, and the pairs that have a line in every pipeline. A
    pair has none if its processes do not reach each other's memory, or if one of them would have more than `most`.
    Collective over all processes, with equal pairs on each; `what` names the call that they are in."""
    mine = [pair for pair in pairs if place.rank in pair]
    made = {pair: new_line(device, sends=pair[0] == place.rank) for pair in mine if len(mine) <= most}
    own = {pair: line for pair, line in made.items() if line is not None}
    addresses = exchange(f"{what} (inboxes)", {pair: line.address for pair, line in own.items()})
    apart = [pair for pair in mine if pair not in own]
    for pair, line in own.items():
        other = place.processes[pair[1] if line.sends else pair[0]]
        if not line.connect(addresses[other].get(pair)):
            apart.append(pair)
    lost = {pair for found in exchange(f"{what} (inboxes out of reach)", apart) for pair in found}
    close_lines([own.pop(pair) for pair in lost & own.keys()], what)
    return own, set(pairs) - lost


def close_lines(lines: Sequence[CopyLine], what: str) -> None:
    """Close lines that nobody uses any more. Collective over all processes."""
    for line in lines:
        line.disconnect()
    exchange(f"{what} (inboxes closed)", None)
    for line in lines:
        line.free()


def drained(lines: Collection[CopyLine]) -> Callable[[], bool]:
    """A function that tells later whether the lines have done all that is queued now, without asking the device."""
    for line in lines:
        line.note()
    return lambda: all(bool(line.noted) for line in lines)
