"""How the ranks of a pipeline tell each other, through torch.distributed's store, that one has failed and why.

In: what a rank says of its own failure. Out: the first failure of all ranks, the same text on each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zbfx.comm.copies import CopyLine
from zbfx.comm.history import History

FAULT_KEY = "fault"
FAULT_GRACE = timedelta(seconds=3)  # how long a rank that lost a connection waits for the reason


@dataclass(frozen=True, slots=True)
class Faults:
    """The pipeline's store, and this rank's calls, which may differ from those of others."""

    store: dist.Store
    history: History

    def known(self) -> str | None:
        """The first failure of all ranks, if one is known."""
        try:
            return self.store.get(FAULT_KEY).decode() if self.store.check([FAULT_KEY]) else None
        except Exception:
            return "the process that holds the store of torch.distributed has ended"

    def first(self, own: str, *, waited: bool = False) -> str:
        """Report a failure; returns the first one of all ranks. `waited`: this rank has only waited for another in
        vain, and leaves the first word to the rank that knows why."""
        try:
            if waited and (difference := self.history.difference()) is not None:
                own, waited = difference, False
            if waited:
                with suppress(Exception):
                    self.store.wait([FAULT_KEY], FAULT_GRACE)
            # The store takes the first value that arrives and returns it to all.
            return self.store.compare_set(FAULT_KEY, "", own).decode()
        except Exception:
            return own  # the process that holds the store is gone

    def all_arrive(self, place: str, everyone: int) -> bool:
        """Whether so many ranks call this for the same place, within a few seconds."""
        deadline = time.monotonic() + FAULT_GRACE.total_seconds()
        with suppress(Exception):  # the process that holds the store is gone
            arrived = self.store.add(place, 1)
            while arrived < everyone and time.monotonic() < deadline:
                time.sleep(0.02)
                arrived = self.store.add(place, 0)
            return arrived >= everyone
        return False


def drained(lines: Collection[CopyLine]) -> Callable[[], bool]:
    """A function that tells later whether the lines have done all that is queued on them now. It does not ask the
    device."""
    for line in lines:
        line.note()
    return lambda: all(bool(line.noted) for line in lines)
