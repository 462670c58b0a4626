"""Ends a process whose GPU waits for a rank that will not come.

Nothing else can: a wait inside a captured step, or for a copy, has no timeout, and the host waits for the device inside
the driver, where neither exceptions nor Ctrl-C reach it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

POLL_S = 0.5
GRACE_S = 3.0  # how long a step may take before anybody asks whether another rank has failed


class Mark(Protocol):
    """A place on a stream of the device, such as `torch.cuda.Event`."""

    def query(self) -> bool: ...


@dataclass
class Begun:
    """A step from its start on; `end` is known once all of it is queued."""

    end: Mark | None = None

    @property
    def is_over(self) -> bool:
        return self.end is not None and self.end.query()


def end_process(reason: str) -> None:
    sys.stdout.flush()
    print(f"zbfx: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


class Overdue:
    """Watches the steps of this process from a thread of its own. `fault()` says why another rank failed, if it did;
    `mark()` is a place on the stream."""

    def __init__(
        self,
        name: str,
        timeout: timedelta,
        fault: Callable[[], str | None],
        mark: Callable[[], Mark],
        end: Callable[[str], None] = end_process,
    ) -> None:
        self.name, self.timeout_s, self.fault, self.mark, self.end = name, timeout.total_seconds(), fault, mark, end
        self.steps: deque[Begun] = deque()
        self.closed = threading.Event()
        self.thread: threading.Thread | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is queued in here must end on the device."""
        if self.thread is None:
            self.thread = threading.Thread(target=self.watch, name="zbfx overdue", daemon=True)
            self.thread.start()
        begun = Begun()
        self.steps.append(begun)
        yield  # an exception is heard by all ranks, and ends the watch (`close`)
        begun.end = self.mark()

    def watch(self) -> None:
        ask_during_captures()
        since = time.monotonic()
        while not self.closed.wait(POLL_S):
            while self.steps and self.steps[0].is_over:
                self.steps.popleft()
                since = time.monotonic()
            if not self.steps:
                since = time.monotonic()
            waited_s = time.monotonic() - since
            fault = self.fault() if waited_s > min(GRACE_S, self.timeout_s) else None
            if fault is not None:
                self.end(f"{self.name} ends, for its device waits for a rank that has failed. {fault}")
                return
            if waited_s > self.timeout_s:
                self.end(
                    f"{self.name} ends: its device has waited in a step for other ranks for {waited_s:.0f} s. "
                    f"bind(timeout_s=...) allows {self.timeout_s:g} s; did every rank make the same calls?"
                )
                return

    def close(self) -> None:
        self.closed.set()


def ask_during_captures() -> None:
    """Let this thread ask the device for events while others capture graphs, which such calls would spoil."""
    with suppress(ImportError):
        from cuda.bindings import driver

        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
