"""A process of the pool: runs its rank's part of one scenario after the other. Started by tests/support/pool.py as
`python -m tests.support.rank <number of the connection's file>`."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

import zbfx

Task = tuple[Callable[..., Any], tuple[Any, ...], int, int, int]  # scenario, arguments, rank, world size, port


@contextmanager
def alone(rank: int, world: int, port: int) -> Iterator[None]:
    """A process group of the scenario's own; ambient state is put back as it was."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    random.seed(0)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        torch.set_default_dtype(dtype)
        if dist.is_initialized():
            dist.destroy_process_group()


def outcome(task: bytes) -> bytes:
    """Whether the scenario returned, and its result or the traceback of what it raised."""
    found = io.BytesIO()
    try:
        scenario, arguments, rank, world, port = pickle.loads(task)
        with alone(rank, world, port):
            torch.save((True, scenario(rank, *arguments)), found)
    except Exception:
        found = io.BytesIO()
        torch.save((False, traceback.format_exc()), found)
    gc.collect()
    return found.getvalue()


def listen(connection: Connection, tasks: SimpleQueue[bytes]) -> None:
    """Ends this process with the one that started it, whatever the rank is doing."""
    try:
        while True:
            tasks.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def serve(connection: Connection) -> None:
    assert zbfx.__all__, "imported once, before the first scenario"
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    tasks: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=listen, args=(connection, tasks), daemon=True).start()
    gc.freeze()
    connection.send_bytes(b"ready")
    while True:
        connection.send_bytes(outcome(tasks.get()))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
