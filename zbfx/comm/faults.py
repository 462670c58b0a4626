"""How the end of a process is noticed: that of this one, by an exception that nobody catches, and those of others that
were killed, on the same host. (Elsewhere lost connections tell.)"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from zbfx.comm.copies import host
from zbfx.comm.history import History

ENDED = "ZX"  # states of processes in /proc


def process_here() -> tuple[str, int]:
    """Where the numbers of processes are those of this process, on this host but for containers with their own, and its
    number."""
    return f"{host()} {os.readlink('/proc/self/ns/pid')}", os.getpid()


def is_gone(process: int) -> bool:
    """Whether a process of this host has ended, waited for by its parent or not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ENDED


def known_fault(history: History, processes: Mapping[str, int]) -> str | None:
    """The first failure of all ranks, if one is known. It is one that a process of a rank, of those on this host, is
    gone without having left."""
    with suppress(Exception):  # the process that holds the store is gone
        for name, process in processes.items():
            if is_gone(process) and not history.has_left(name):
                return history.first_fault(f"{name}: its process has ended")
    return history.known_fault()


class Uncaught:
    """Calls `tell`, a method or None once its object is gone, with an exception that ends this process, before it is
    printed."""

    def __init__(self, tell: Callable[[], Callable[[BaseException], object] | None]) -> None:
        self.tell, self.before = tell, sys.excepthook
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (tell := self.tell()) is not None:
            tell(error)
        self.before(kind, error, trace)

    def forget(self) -> None:
        """Call nothing any more."""
        self.tell = lambda: None
        if sys.excepthook is self:
            sys.excepthook = self.before
