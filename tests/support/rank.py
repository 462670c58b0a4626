"""A process of the pool: forks ranks, which run their parts of one scenario after the other. Started by
tests/support/pool.py as `python -m tests.support.rank <number of the connection's file>`."""

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
from multiprocessing.reduction import recv_handle
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.known_traces import trace_once
from tests.support.models import gpt2, mlp
from tests.support.reference import compiled
from tests.support.small import settle_for_small_models

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
        dist.barrier()  # else one may leave before another has connected
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
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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
    """A rank."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    tasks: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=listen, args=(connection, tasks), daemon=True).start()
    while True:
        connection.send_bytes(outcome(tasks.get()))


def fork(control: Connection) -> None:
    """Ranks on request, each with a connection and a file for what it writes to stderr, and how they have ended."""
    patch = pytest.MonkeyPatch()
    torch.set_num_threads(1)
    settle_for_small_models(patch)
    trace_once(patch, {})
    gpt2(1)  # what both import is imported once, before the first rank
    if not torch.backends.cuda.is_built():  # there a first backward starts threads of devices, which no fork survives
        compiled(mlp(1), 2, 1, check=False)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    control.send(True)
    while True:
        try:
            pid = control.recv()
        except EOFError:
            return
        if pid is not None:
            control.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            continue
        connection, errors = recv_handle(control), recv_handle(control)
        pid = os.fork()
        if not pid:
            control.close()
            os.dup2(errors, sys.stderr.fileno())
            serve(Connection(connection))
        os.close(connection)
        os.close(errors)
        control.send(pid)


if __name__ == "__main__":
    fork(Connection(int(sys.argv[1])))
