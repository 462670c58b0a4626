"""Messages between GPUs of one host by their copy engines: who waits takes nothing from the multiprocessors.

A receive of NCCL that waits keeps its thread blocks on the device, and kernels made for all multiprocessors run much
longer beside them: on an H200 the phases of a GPT take 7 to 25 % longer beside two such blocks. Here the sender copies
into an inbox, memory of the receiver that both processes map, and streams wait by themselves for words in device
memory. All of it can be captured in a CUDA graph.

The words: the receiver's say which slots of its inbox are full, the sender's which are free. Whoever waits for a word
takes it back, so that every step, and every replay, finds the words as the one before.

CUDA driver API: stream memory operations, inter-process memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from platform import node
from typing import Any

import torch
from cuda.bindings import driver
from torch import Tensor

from zbfx.channels import Lines, Pair
from zbfx.place import Place
from zbfx.together import exchange

SLOTS = 2  # of an inbox: one is filled while the other is emptied
SLOT_BYTES = 2**24
WORD_BYTES = 4
WORDS_BYTES = 256  # in front of the slots
INBOX_BYTES = WORDS_BYTES + SLOTS * SLOT_BYTES

EQUAL = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


def checked(result: tuple[Any, ...]) -> Any:
    """The value that a call of the driver returns beside its error code."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{error.name} ({int(error)})")
    return values[0] if values else None


@dataclass(frozen=True)
class Address:
    """What opens the memory of a process for the others of its host."""

    host: str
    handle: bytes


def host() -> str:
    """The machine, as it runs now."""
    return f"{node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


@dataclass(frozen=True)
class Arrival:
    """The end of a transfer on its stream."""

    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        """Make the current stream wait for it."""
        torch.cuda.current_stream(self.device).wait_event(self.event)


class Line:
    """One end of a channel between two processes of one host, and the stream on which it works."""

    def __init__(self, device: torch.device, *, sends: bool) -> None:
        self.device, self.sends = device, sends
        with torch.cuda.device(device):
            # PyTorch hands out the same few streams again and again: one that waits for another rank is used alone.
            self.handle = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            self.own = int(checked(driver.cuMemAlloc(WORDS_BYTES if sends else INBOX_BYTES)))
            checked(driver.cuMemsetD32(self.own, int(sends), SLOTS))  # all slots are free
            torch.cuda.synchronize(device)
        self.stream = torch.cuda.ExternalStream(int(self.handle), device)
        self.other = 0
        self.transfers = 0

    def address(self) -> Address | None:
        """What opens this end for the other process; None where the driver shares no memory."""
        try:
            return Address(host(), bytes(checked(driver.cuIpcGetMemHandle(self.own)).reserved))
        except DriverError:
            return None

    def connect(self, address: Address | None) -> bool:
        """Map the other end; whether this process can."""
        if address is None or address.host != host():
            return False
        handle = driver.CUipcMemHandle()
        handle.reserved = address.handle
        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        try:
            with torch.cuda.device(self.device):
                self.other = int(checked(driver.cuIpcOpenMemHandle(handle, lazily)))
        except DriverError:
            return False
        return True

    def transfer(self, value: Tensor) -> Arrival:
        """Send a dense tensor, or receive one, after all that the current stream has to do before. The tensor must live
        until the arrival was waited for."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        bytes_left, address, slot = value.numel() * value.element_size(), value.data_ptr(), 0
        while bytes_left > 0:
            size = min(bytes_left, SLOT_BYTES)
            word, box = slot * WORD_BYTES, WORDS_BYTES + slot * SLOT_BYTES
            checked(driver.cuStreamWaitValue32(self.handle, self.own + word, 1, EQUAL))
            checked(driver.cuStreamWriteValue32(self.handle, self.own + word, 0, 0))
            target, source = (self.other + box, address) if self.sends else (address, self.own + box)
            checked(driver.cuMemcpyDtoDAsync(target, source, size, self.handle))
            checked(driver.cuStreamWriteValue32(self.handle, self.other + word, 1, 0))
            bytes_left, address, slot = bytes_left - size, address + size, (slot + 1) % SLOTS
        self.transfers += 1
        return Arrival(self.stream.record_event(), self.device)

    def close(self) -> None:
        """Let go of both ends' memory; nobody may use it any more."""
        if self.other:
            checked(driver.cuIpcCloseMemHandle(self.other))
        checked(driver.cuMemFree(self.own))
        checked(driver.cuStreamDestroy(self.handle))


def open_lines(pairs: Sequence[Pair], place: Place, device: torch.device) -> tuple[Lines, set[Pair]]:
    """This process's ends of channels between ranks, and the pairs that have one in every pipeline: those whose
    processes reach each other's memory. Collective over all processes, with the same pairs on each."""
    own = {pair: Line(device, sends=pair[0] == place.rank) for pair in pairs if place.rank in pair}
    addresses = exchange("bind (inboxes)", {pair: line.address() for pair, line in own.items()})
    apart = []
    for (source, target), line in own.items():
        other = place.processes[target if line.sends else source]
        if not line.connect(addresses[other][source, target]):
            apart.append((source, target))
    lost = {pair for found in exchange("bind (inboxes out of reach)", apart) for pair in found}
    for pair in lost & own.keys():
        own.pop(pair).close()
    return own, set(pairs) - lost
