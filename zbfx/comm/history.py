"""What ranks tell each other through torch.distributed's store: the calls that each has made, and why one has failed.
In: the calls and failures of this rank. Out: a sentence that says which calls differ; the first failure of all ranks.
Nothing is written while calls follow each other quickly. If none follows for some seconds, a thread writes the last
ones into the store. The first rank to write a call settles what the others must have called. Calls never change
afterwards, so that ranks which are slow, but make equal calls, never differ."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from zbfx.errors import SAME_CALLS

COMPARE_S = 3.0  # from the beginning of a call until it is written, if none follows
LOOK_S = 0.5
CLOSE = "close, or the end of its process"
FAULT = "fault"  # its key in the store
FAULT_GRACE = timedelta(seconds=3)  # how long a rank that lost a connection waits for the reason
KEPT = 8  # calls: a rank may be that far ahead, as some calls need nothing from other ranks

Differs = Callable[[str], None]


class Call(NamedTuple):
    """The `number`th call of a pipeline, from 1. `batch`: the shapes of its batch, if it takes one; None: not yet
    known."""

    number: int
    kind: str
    batch: str | None = ""

    def __str__(self) -> str:
        return f"{self.kind} with {self.batch}" if self.batch else self.kind


class History:
    """The last calls of this rank. `tag` is a hash of the last: messages that carry it never meet those of another
    call. `differs()` is what the thread calls with the reason once other calls were made; None: the pipeline is
    gone."""

    def __init__(
        self,
        name: str,
        store: dist.Store,
        differs: Callable[[], Differs | None],
        family: str = "",
        *,
        looks: bool = False,
    ) -> None:
        """`family`: the processes that `all_arrive` counts. `looks`: some ranks share no connection that the end of
        another one closes, and hear of its failure by looking."""
        self.name, self.store, self.differs, self.family, self.looks = name, store, differs, family, looks
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
        self.closed = True

    def end(self) -> None:
        """This rank makes no more calls, as at the end of its process; ranks that go on hear of it. A fork of the
        process, which may end earlier, writes nothing."""
        if not self.closed and os.getpid() == self.process:
            self.close()
            self.put(Call(self.calls[-1].number + 1, CLOSE))
            self.difference()

    def leave(self) -> None:
        """This process takes no part any more: its end is no failure. That of a fork never was one."""
        if os.getpid() == self.process:
            with suppress(Exception):  # the process that holds the store is gone
                self.store.set(f"{self.name} left", "")

    def has_left(self, name: str) -> bool:
        """Whether another rank takes no part any more."""
        return self.store.check([f"{name} left"])

    def watch(self) -> None:
        while not self.closed:
            if time.monotonic() - self.begun_s > COMPARE_S and (found := self.difference() or self.seen()) is not None:
                differs = self.differs()
                if differs is not None and not self.closed:
                    differs(found)
                return
            time.sleep(LOOK_S)

    def seen(self) -> str | None:
        """A failure that another rank has reported, if this one looks."""
        with suppress(Exception):  # the process that holds the store is gone
            if self.looks and self.store.check([FAULT]):
                return self.store.get(FAULT).decode()
        return None

    def difference(self) -> str | None:
        """Write the calls that are not in the store yet; returns how they differ from what another rank has written."""
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

    def known_fault(self) -> str | None:
        """The first failure of all ranks, if one is known."""
        try:
            return self.store.get(FAULT).decode() if self.store.check([FAULT]) else None
        except Exception:
            return "the process that holds the store of torch.distributed has ended"

    def first_fault(self, own: str, *, waited: bool = False) -> str:
        """Report a failure; returns the first one of all ranks. `waited`: this rank has only waited for another in
        vain, and leaves the first word to the rank that knows why."""
        try:
            if waited and (difference := self.difference()) is not None:
                own, waited = difference, False
            if waited:
                with suppress(Exception):
                    self.store.wait([FAULT], FAULT_GRACE)
            # The store takes the first value that arrives and returns it to all.
            return self.store.compare_set(FAULT, "", own).decode()
        except Exception:
            return own  # the process that holds the store is gone

    def all_arrive(self, place: str, everyone: int) -> bool:
        """Whether so many ranks call this for the same place, within a few seconds."""
        deadline, place = time.monotonic() + FAULT_GRACE.total_seconds(), f"{place}, {self.family}"
        with suppress(Exception):  # the process that holds the store is gone
            arrived = self.store.add(place, 1)
            while arrived < everyone and time.monotonic() < deadline:
                time.sleep(0.02)
                arrived = self.store.add(place, 0)
            return arrived >= everyone
        return False
