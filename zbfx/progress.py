"""What takes long says so: a line on stderr for whatever goes on for more than two seconds, and a log of it all.

In: `announce`, from wherever work is done, and `showing`, around a call of the user's. Out: the line, and records of
the logger "zbfx" at level DEBUG. Work that nobody shows, like a call from a test, is logged alone.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import TextIO

LOG = logging.getLogger("zbfx")
LONG_S, EVERY_S = 2.0, 0.5  # after which a line appears, and how often it is written again


class ProgressLine:
    """What goes on, on a stream: on a terminal one line that changes, elsewhere a line for each thing that takes
    long."""

    def __init__(self, call: str, stream: TextIO) -> None:
        self.call, self.stream, self.on_terminal = call, stream, stream.isatty()
        self.what, self.begun_s, self.written = "", perf_counter(), ""
        self.ended = threading.Event()
        self.writer = threading.Thread(target=self.run, name="zbfx progress", daemon=True)

    def set(self, what: str) -> None:
        self.what = what

    def run(self) -> None:
        wait_s = LONG_S
        while not self.ended.wait(wait_s):
            wait_s = EVERY_S
            self.write()

    def write(self) -> None:
        what = f"{self.call}: {self.what}"
        if self.on_terminal:
            text = f"{what}, {perf_counter() - self.begun_s:.0f} s"
            self.stream.write(f"\r{text:<{len(self.written)}}")
            self.written = text
        elif what != self.written:
            self.stream.write(f"{what}\n")
            self.written = what
        self.stream.flush()

    def end(self) -> None:
        """Leave nothing behind on a terminal."""
        self.ended.set()
        self.writer.join()
        if self.on_terminal and self.written:
            self.stream.write(f"\r{'':<{len(self.written)}}\r")
            self.stream.flush()


CURRENT: ContextVar[ProgressLine | None] = ContextVar("zbfx progress", default=None)


@contextmanager
def showing(call: str, asked: bool | None) -> Iterator[None]:
    """Meanwhile stderr shows what goes on in a call of the user's, once the call takes over two seconds: if that is
    `asked` for, or, where it is None, if stderr is a terminal."""
    if not (sys.stderr.isatty() if asked is None else asked):
        yield
        return
    line = ProgressLine(call, sys.stderr)
    before = CURRENT.set(line)
    line.writer.start()
    try:
        yield
    finally:
        CURRENT.reset(before)
        line.end()


def announce(what: str, number: int | None = None, of: int | None = None) -> None:
    """What begins now, and how far that is: the `number`-th, from 1, of so many, where that is known."""
    far = "" if number is None else f", {number}" if of is None else f", {number} of {of}"
    text = what + far
    LOG.debug("%s", text)
    line = CURRENT.get()
    if line is not None:
        line.set(text)
