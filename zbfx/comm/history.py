"""Which calls a rank has made, and how ranks whose calls differ hear of it.

In: the calls of this rank, a store that all ranks share. Out: a sentence that says which calls differ.

Nothing is written while calls follow each other quickly. If none follows for some seconds, a thread writes the last
ones into the store. The first rank to write a call settles what the others must have called. Calls never change
afterwards, so that ranks which are slow, but make equal calls, never differ.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from zbfx.errors import SAME_CALLS

COMPARE_S = 3.0  # from the beginning of a call until it is written, if none follows
LOOK_S = 0.5
CLOSE = "close, or the end of its process"
KEPT = 8  # calls: a rank may be that far ahead, as some calls need nothing from other ranks

Differs = Callable[[str], None]


class Call(NamedTuple):
    """The `number`th call of a pipeline, from 1. `batch`: the shapes of its batch, empty if it takes none; None: not
    known yet."""

    number: int
    kind: str
    batch: str | None = ""

    def __str__(self) -> str:
        return f"{self.kind} with {self.batch}" if self.batch else self.kind


class History:
    """The last calls of this rank.

    `tag` is a hash of the last one: messages that carry it never meet those of another call. `differs()` is a function
    that the thread calls with the reason once another rank has made other calls, or None if the pipeline is gone.
    """

    def __init__(self, name: str, store: dist.Store, differs: Callable[[], Differs | None]) -> None:
        self.name, self.store, self.differs = name, store, differs
        self.calls: deque[Call] = deque([Call(0, "bind")], KEPT)
        self.told = 0  # the number of the last call that the store knows
        self.begun_s, self.tag = 0.0, 0
        self.closed = False  # set in finalizers, which may run inside any code: no lock
        self.process = os.getpid()

    @property
    def place(self) -> str:
        """The last call, without its batch."""
        return f"call {self.calls[-1].number}, {self.calls[-1].kind}"

    def begin(self, kind: str, *, batch: bool = False) -> None:
        """This rank begins a call. `batch`: the call takes one, whose shapes `given` reports later."""
        self.put(Call(self.calls[-1].number + 1, kind, None if batch else ""))
        if self.calls[-1].number == 1:
            threading.Thread(target=self.watch, name="zbfx calls", daemon=True).start()

    def given(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """The shapes of the call's batch, by name."""
        self.put(self.calls.pop()._replace(batch=", ".join(f"{name} {shape}" for name, shape in shapes.items())))

    def refused(self) -> None:
        """All ranks refuse their batches, which may differ: this call is never written."""
        self.told = self.calls[-1].number

    def put(self, call: Call) -> None:
        self.calls.append(call)
        self.tag = zlib.crc32(repr(call).encode()) & 0x7FFFFFFF  # as far as gloo's tags go
        self.begun_s = time.monotonic()

    def close(self) -> None:
        """Watch no longer."""
        self.closed = True

    def end(self) -> None:
        """This rank makes no more calls, as at the end of its process; ranks that go on hear of it. A fork of the
        process, which may end earlier, writes nothing."""
        if not self.closed and os.getpid() == self.process:
            self.close()
            self.put(Call(self.calls[-1].number + 1, CLOSE))
            self.difference()

    def watch(self) -> None:
        while not self.closed:
            if time.monotonic() - self.begun_s > COMPARE_S and (found := self.difference()) is not None:
                differs = self.differs()
                if differs is not None and not self.closed:
                    differs(found)
                return
            time.sleep(LOOK_S)

    def difference(self) -> str | None:
        """Write the calls that are not in the store yet; returns how another rank's differ, if it has written its
        own before."""
        with suppress(Exception):  # the process that holds the store is gone
            for call in tuple(self.calls):
                if call.number <= self.told:
                    continue
                key, own = f"call {call.number}", f"{self.name}: {call}"
                if call.batch is None:  # its batch may still be refused: it is compared, and not written
                    first = self.store.get(key).decode() if self.store.check([key]) else own
                    first = first.partition(" with ")[0]
                else:
                    first = self.store.compare_set(key, "", own).decode()
                if first.partition(": ")[2] != str(call):
                    return (
                        f"ranks made different calls, but {SAME_CALLS}, with batches of the same shapes; found for "
                        f"call {call.number} of this pipeline {'; '.join(sorted((first, own)))}"
                    )
                if call.batch is not None:
                    self.told = call.number
                    self.store.delete_key(f"call {call.number - 2 * KEPT}")
        return None
