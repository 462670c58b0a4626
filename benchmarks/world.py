"""The ranks of a benchmark outside of any case: a store to agree through, and a journal that survives a restart.

A case that hangs cannot be ended from inside, so its processes end themselves and `torchrun --max-restarts` starts
fresh ones, which read in the journal how far the last ones came.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import time
from typing import Any

import torch
import torch.distributed as dist

FAILURE_GRACE_S = 15.0  # how long a rank that failed waits for the others, which may hang, before all start afresh


@dataclass
class World:
    """This process among the ranks of one host. `restart` counts how often torchrun started them again."""

    rank: int
    ranks: int
    restart: int
    device: torch.device
    store: dist.Store

    @classmethod
    def from_environment(cls, kind: str) -> World:
        """As torchrun says; alone without it."""
        rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if kind == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
        if "MASTER_PORT" in os.environ:
            port = int(os.environ["MASTER_PORT"])
            hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
        else:
            port, hosts_store = 0, True
        store = dist.TCPStore(os.environ.get("MASTER_ADDR", "127.0.0.1"), port, is_master=hosts_store)
        return cls(rank, ranks, restart, device, dist.PrefixStore(f"benchmark/{restart}", store))

    def gather(self, key: str, value: Any, timeout_s: float = 3600.0) -> list[Any]:
        """Every rank's value (as JSON) under a key used once, on every rank."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.ranks)]
        self.store.wait(keys, timedelta(seconds=timeout_s))
        return [json.loads(self.store.get(name)) for name in keys]

    @contextmanager
    def process_group(self, key: str, timeout_s: float) -> Iterator[None]:
        """A default process group of its own, gone with everything made from it at the end. Where ranks share GPUs,
        for a dry run, it is without NCCL."""
        nccl = self.device.type == "cuda" and self.ranks <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"group/{key}", self.store),
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End this process, with every thread's stack on stderr, when the block takes longer, whatever it waits for."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@dataclass
class Journal:
    """What was begun, failed and finished, one JSON line each, beside the output file."""

    path: Path

    def write(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in self.path.read_text().splitlines()]
        return []

    def begin(self) -> None:
        """A new benchmark: forget the last one."""
        self.path.unlink(missing_ok=True)
        self.write(started_s=time())

    @property
    def elapsed_s(self) -> float:
        """Since the benchmark began, restarts included."""
        return time() - next(entry["started_s"] for entry in self.read() if "started_s" in entry)

    def finished(self) -> int:
        """How many cases have their row."""
        return sum("end" in entry for entry in self.read())

    def unfinished(self) -> int | None:
        """The case that was begun and has no row."""
        entries = self.read()
        ended = {entry["end"] for entry in entries if "end" in entry}
        return next((entry["begin"] for entry in entries if entry.get("begin", None) not in {None, *ended}), None)

    def failure(self, case: int) -> str | None:
        """The first failure that a rank wrote down about a case."""
        return next((entry["text"] for entry in self.read() if entry.get("failed") == case), None)
