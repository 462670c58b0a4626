"""Scenarios over gloo: functions of a rank, each run by processes of its own process group.

Starting a process costs seconds of imports, so processes are kept from one scenario to the next, unless they hang or
end. Every process has other hashes of strings than its neighbours. None outlives the one that started it.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
START_S = 120.0  # for a process to import what it needs
LIMIT_S = 100.0  # for a scenario
GRACE_S = 10.0  # for the other ranks once one has failed
DUMP_S = 1.0  # for a rank that hangs to write where

Results = dict[int, Any]  # by rank, of those that end by themselves
Scenario = Callable[..., Any]  # of the rank and the arguments of a launch
Launch = Callable[..., Results]  # Pool.launch


@dataclass(frozen=True)
class Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    errors: IO[bytes]  # all that it writes to stderr

    @staticmethod
    def start(rank: int) -> Worker:
        here, there = multiprocessing.Pipe()
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONHASHSEED": str(rank + 1)}
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.support.rank", str(there.fileno())],
            cwd=ROOT,
            env=os.environ | settings,
            pass_fds=[there.fileno()],
            stderr=errors,
            start_new_session=True,  # Ctrl-C is the parent's
        )
        there.close()
        return Worker(process, here, errors)

    def written(self, since: int) -> str:
        self.errors.seek(since)
        return self.errors.read().decode(errors="replace").strip()

    def where(self) -> str:
        """The tracebacks of all threads of a process that hangs."""
        since = self.errors.seek(0, os.SEEK_END)
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(DUMP_S)
        return self.written(since)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.errors.close()


def told(faults: Mapping[int, str]) -> Iterator[str]:
    """What went wrong, once for all ranks of which the same is said."""
    for text in dict.fromkeys(faults[rank] for rank in sorted(faults)):
        ranks = [str(rank) for rank in sorted(faults) if faults[rank] == text]
        yield f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} {text}"


@dataclass
class Pool:
    """A rank is always run by the worker of its number; workers are started when they are first needed."""

    workers: dict[int, Worker] = field(default_factory=dict)
    outcomes: dict[Any, Results | str] = field(default_factory=dict)  # by launch; a text says what went wrong

    def launch(
        self, world: int, scenario: Scenario, *arguments: Any, ends: Collection[int] = (), limit_s: float = LIMIT_S
    ) -> Results:
        """Results of the ranks, but for those that a scenario `ends`; one run for all tests that ask for it."""
        launched = (world, scenario, arguments)
        if launched not in self.outcomes:
            self.outcomes[launched] = self.run(world, scenario, arguments, ends, limit_s)
        found = self.outcomes[launched]
        assert not isinstance(found, str), found
        return found

    def run(
        self, world: int, scenario: Scenario, arguments: tuple[Any, ...], ends: Collection[int], limit_s: float
    ) -> Results | str:
        workers = self.ready(world)
        waiting = {worker.connection: rank for rank, worker in workers.items()}
        # As under torchrun, the store lives in a process that is no rank.
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        for rank, worker in workers.items():
            worker.connection.send_bytes(pickle.dumps((scenario, arguments, rank, world, store.port)))
        results: Results = {}
        faults: dict[int, str] = {}
        begun = time.monotonic()
        deadline = begun + limit_s
        while waiting and (heard := wait(waiting, max(0.0, deadline - time.monotonic()))):
            for connection in heard:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    returned, value = torch.load(io.BytesIO(connection.recv_bytes()))
                except (EOFError, ConnectionError):
                    worker = self.workers.pop(rank)
                    code = worker.process.wait()
                    if rank not in ends:
                        faults[rank] = f"ended with status {code}; it wrote\n{worker.written(0)}"
                    worker.end()
                    continue
                if returned:
                    results[rank] = value
                else:
                    faults[rank] = f"raised\n{value}"
            if faults:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            worker = self.workers.pop(rank)
            faults[rank] = f"hangs after {time.monotonic() - begun:.0f} s, at\n{worker.where()}"
            worker.end()
        faults |= {rank: "did not end" for rank in ends if rank in results}
        if not faults:
            return {rank: results[rank] for rank in sorted(results)}
        called = f"{scenario.__module__}.{scenario.__qualname__}{arguments}"
        return "\n".join([f"scenario {called} of {world} ranks:", *told(faults)])

    def ready(self, world: int) -> dict[int, Worker]:
        """The workers of the first ranks, which have imported what they need."""
        for rank in [rank for rank, worker in self.workers.items() if worker.process.poll() is not None]:
            self.workers.pop(rank).end()
        new = {rank: Worker.start(rank) for rank in range(world) if rank not in self.workers}
        self.workers |= new
        for rank, worker in new.items():
            try:
                told = worker.connection.poll(START_S) and worker.connection.recv_bytes()
            except (EOFError, ConnectionError):
                told = False
            if not told:
                where = worker.where()
                self.close()
                raise RuntimeError(f"the process of rank {rank} does not start; it wrote\n{where}")
        return {rank: self.workers[rank] for rank in range(world)}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.workers.clear()
