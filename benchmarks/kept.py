"""Processes that stay: imports of torch take seconds, so each runs one call after the other.

A process that leads starts processes of its own: it has a session, and ending it ends them too. All end with the one
that started them.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, TypeVar

Asked = TypeVar("Asked")
Gave = TypeVar("Gave")


def serve(connection: Connection, leads: bool) -> None:
    if leads:
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that started it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        while True:
            function, argument = connection.recv()
            connection.send(function(argument))
    except (EOFError, OSError):  # whoever asks is gone
        os._exit(0)


@dataclass(frozen=True)
class Kept:
    process: BaseProcess
    connection: Connection
    leads: bool

    @classmethod
    def start(cls, *, leads: bool = False) -> Kept:
        here, there = Pipe()
        process = get_context("spawn").Process(target=serve, args=(there, leads), daemon=not leads)
        process.start()
        there.close()
        return cls(process, here, leads)

    def ask(self, function: Callable[[Any], Any], argument: object) -> None:
        """Begin a call. What it gives comes over the connection, which ends if the process does."""
        self.connection.send((function, argument))

    def end(self) -> None:
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL) if self.leads else self.process.kill()
        except ProcessLookupError:  # leads nobody yet
            self.process.kill()
        self.process.join()
        self.connection.close()


def over_processes(
    function: Callable[[Asked], Gave],
    arguments: Iterable[Asked],
    workers: int,
    limit_s: float,
    failed: Callable[[Asked, str], Gave],
) -> Generator[Gave]:
    """What calls give, as they end, over so many processes. A process that dies or hangs is replaced, and `failed` is
    given its argument and what went wrong. Closing the iterator ends all processes."""
    waiting, idle = deque(arguments), list[Kept]()
    busy = dict[Connection, tuple[Kept, Asked, float]]()
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                kept, argument = idle.pop() if idle else Kept.start(leads=True), waiting.popleft()
                busy[kept.connection] = kept, argument, monotonic() + limit_s
                kept.ask(function, argument)
            soonest = min(until for _, _, until in busy.values())
            heard = wait(list(busy), max(0.0, soonest - monotonic()))
            for connection, (kept, argument, until) in list(busy.items()):
                if connection not in heard and monotonic() < until:
                    continue
                try:
                    if connection not in heard:
                        raise TimeoutError(f"hangs: no result within {limit_s:g} s")
                    found: Gave = kept.connection.recv()
                    idle.append(kept)
                except (EOFError, OSError) as error:
                    kept.end()
                    text = str(error) or f"the process ended with status {kept.process.exitcode}"
                    found = failed(argument, text)
                del busy[connection]
                yield found
    finally:
        for kept in [*idle, *(kept for kept, _, _ in busy.values())]:
            kept.end()
