"""Scenarios over gloo: functions of a rank, each run by processes of its own process group.

Imports take seconds, so processes are kept from one scenario to the next, unless they hang or end. They are
forked from processes that have imported, have compiled once, and run nothing. Every rank has other hashes of strings
than its neighbours. A rank traces models that are alike once. No process outlives the one that started it.
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
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
START_S = 120.0  # for a process to import what it needs
TEMPLATES = 3  # neither neighbours nor ranks two apart are of one
LIMIT_S = 100.0  # for a scenario
GRACE_S = 10.0  # for the other ranks once one has failed
DUMP_S = 1.0  # for a rank that hangs to write where

Results = dict[int, Any]  # by rank, of those that end by themselves
Scenario = Callable[..., Any]  # of the rank and the arguments of a launch
Launch = Callable[..., Results]  # Pool.launch


@dataclass(frozen=True)
class Template:
    """A process that has imported what ranks need, runs nothing, and forks: a rank that has ended is soon replaced."""

    process: subprocess.Popen[bytes]
    control: Connection
    errors: IO[bytes]  # all that it writes to stderr

    @staticmethod
    def start(hash_seed: int) -> Template:
        here, there = multiprocessing.Pipe()
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONHASHSEED": str(hash_seed)}
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.support.rank", str(there.fileno())],
            cwd=ROOT,
            env=os.environ | settings,
            pass_fds=[there.fileno()],
            stderr=errors,
            start_new_session=True,  # Ctrl-C is the parent's
        )
        there.close()
        return Template(process, here, errors)

    def is_ready(self) -> bool:
        try:
            return self.control.poll(START_S) and bool(self.control.recv())
        except (EOFError, ConnectionError):
            return False

    def fork(self) -> Worker:
        here, there = multiprocessing.Pipe()
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.control.send(None)
        for file in (there.fileno(), errors.fileno()):
            send_handle(self.control, file, self.process.pid)
        there.close()
        return Worker(self, self.control.recv(), here, errors)

    def status_of(self, pid: int) -> int:
        """With which status a rank has ended, or ends."""
        self.control.send(pid)
        return int(self.control.recv())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.control.close()
        self.errors.close()


@dataclass(frozen=True)
class Worker:
    """The process of a rank."""

    template: Template
    pid: int
    connection: Connection
    errors: IO[bytes]

    def where(self) -> str:
        """The tracebacks of all threads of a process that hangs."""
        since = self.errors.seek(0, os.SEEK_END)
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(DUMP_S)
        return written(self.errors, since)

    def has_ended(self) -> bool:
        """Whether the process, which owes no result, is gone."""
        return self.connection.poll()

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.template.status_of(self.pid)
        self.close()

    def close(self) -> None:
        self.connection.close()
        self.errors.close()


def written(errors: IO[bytes], since: int = 0) -> str:
    errors.seek(since)
    return errors.read().decode(errors="replace").strip()


def told(faults: Mapping[int, str]) -> Iterator[str]:
    """What went wrong, once for all ranks of which the same is said."""
    for text in dict.fromkeys(faults[rank] for rank in sorted(faults)):
        ranks = [str(rank) for rank in sorted(faults) if faults[rank] == text]
        yield f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} {text}"


@dataclass
class Pool:
    """A rank is always run by the worker of its number; workers are started when they are first needed."""

    templates: list[Template] = field(default_factory=list)
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
                    code = worker.template.status_of(worker.pid)
                    if rank not in ends:
                        faults[rank] = f"ended with status {code}; it wrote\n{written(worker.errors)}"
                    worker.close()
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
        new = [Template.start(seed) for seed in range(len(self.templates) + 1, min(world, TEMPLATES) + 1)]
        self.templates += new
        for template in new:
            if not template.is_ready():
                wrote = written(template.errors)
                self.close()
                raise RuntimeError(f"a process from which ranks are forked does not start; it wrote\n{wrote}")
        for rank in [rank for rank, worker in self.workers.items() if worker.has_ended()]:
            self.workers.pop(rank).end()
        missing = [rank for rank in range(world) if rank not in self.workers]
        self.workers |= {rank: self.templates[rank % TEMPLATES].fork() for rank in missing}
        return {rank: self.workers[rank] for rank in range(world)}

    def end_workers(self) -> None:
        for worker in self.workers.values():
            worker.end()
        self.workers.clear()

    def close(self) -> None:
        self.end_workers()
        for template in self.templates:
            template.end()
        self.templates.clear()
