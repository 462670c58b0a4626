"""Ends a process whose GPU waits for a rank that will not come.
In: how many steps the host has begun, and how many the device has got through. Out: the end of the process, and why.
Nothing else can end such a wait. Inside a captured step, or for a copy, it has no timeout. The host waits for the
device inside the driver, where neither exceptions nor Ctrl-C reach it. The thread that watches asks the device for
nothing, because such calls may wait too: the device itself writes into memory of the host how far it has come."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

POLL_S = 0.5
GRACE_S = 3.0  # how long a step may take once another rank is known to have failed
LAST_WORDS_S = 8.0  # how long a device may take after its process has failed: it may wait for messages in vain
EXIT_S = 5  # how long a process that has failed may take to end


class Progress:
    """Counts the steps that a device has got through."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.zeros((), dtype=torch.int64, device=device)
        self.on_host = torch.zeros((), dtype=torch.int64, pin_memory=True)

    def advance(self) -> None:
        """Count one more, once the current stream has come here."""
        self.on_device += 1
        self.on_host.copy_(self.on_device, non_blocking=True)

    def __call__(self) -> int:
        return int(self.on_host)


def say(reason: str) -> None:
    """Print for the user what this process or another has failed with."""
    with suppress(OSError, ValueError):  # nobody listens
        print(f"zbfx: {reason}", file=sys.stderr, flush=True)


def end_process(reason: str) -> None:
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    say(reason)
    os._exit(1)


def start(watch: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=watch, name="zbfx overdue", daemon=True)
    thread.start()
    return thread


def ends_within(limit_s: float, work: Callable[[], None]) -> bool:
    """Do work whose errors mean nothing, in a thread of its own; whether it has ended in time."""

    def quietly() -> None:
        with suppress(Exception):
            work()

    thread = start(quietly)
    thread.join(limit_s)
    return not thread.is_alive()


def bound_exit() -> None:
    """From now on this process ends within `EXIT_S` once it begins to end. Destructors of a broken device's connections
    may wait for ever, and the system's alarm needs no thread of Python."""
    atexit.unregister(arm)
    atexit.register(arm)


def arm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_S)


class Overdue:
    """Watches, from a thread of its own, that the device gets through each step that the host has begun. `done()`: how
    many it has got through; `fault()`: why another rank has failed, or None; `allowed` says what sets the timeout."""

    def __init__(
        self,
        name: str,
        timeout: timedelta,
        allowed: str,
        done: Callable[[], int],
        fault: Callable[[], str | None] = lambda: None,
        end: Callable[[str], None] = end_process,
    ) -> None:
        self.name, self.timeout_s, self.allowed = name, timeout.total_seconds(), allowed
        self.done, self.fault, self.end = done, fault, end
        self.begun = 0
        self.closed = False  # set in finalizers, which may run inside any code: no lock

    def begin(self) -> None:
        self.begun += 1
        if self.begun == 1:
            start(self.watch)

    def close(self) -> None:
        self.closed = True

    def failed(self, reason: str, drained: Callable[[], bool]) -> None:
        """This process has failed: it ends unless its device is `drained` soon."""
        self.close()
        start(lambda: self.watch_last_words(reason, drained))

    def watch(self) -> None:
        moved = known = time.monotonic()
        seen = -1
        while not self.closed:
            time.sleep(POLL_S)
            done, now = self.done(), time.monotonic()
            if done != seen or done >= self.begun:
                seen, moved, known = done, now, now
                continue
            fault = self.fault() if now - moved > GRACE_S else None
            known = now if fault is None else known
            if self.closed:
                return
            if now - known > GRACE_S:
                self.end(f"{self.name} ends, for its device waits for a rank that has failed. {fault}")
                return
            if now - moved > self.timeout_s:
                self.end(
                    f"{self.name} ends: its device has waited for other ranks for {now - moved:.0f} s, and "
                    f"{self.allowed}. Did every rank make the same calls?"
                )
                return

    def watch_last_words(self, reason: str, drained: Callable[[], bool]) -> None:
        end = time.monotonic() + LAST_WORDS_S
        while not drained():
            if time.monotonic() > end:
                self.end(f"{self.name} ends, for it has failed, and its device waits for messages to come. {reason}")
                return
            time.sleep(POLL_S)
