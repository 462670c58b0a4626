"""The pool of processes that other tests use: what goes wrong is named, harms no other scenario, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pool

pytestmark = pytest.mark.processes


def together(rank: int) -> dict[str, int]:
    numbers = torch.tensor([float(rank + 1)])
    dist.all_reduce(numbers)
    return {"sum": int(numbers), "hash": hash("zbfx"), "process": os.getpid(), "threads": torch.get_num_threads()}


def one_hangs(rank: int) -> None:
    torch.set_default_dtype(torch.float64)
    if rank == 1:
        time.sleep(1000)  # here


def one_dies(rank: int) -> str:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def one_raises(rank: int) -> None:
    if rank == 0:
        raise ArithmeticError("on purpose")


@pytest.fixture(scope="module")
def own(pool: Pool) -> Iterator[Pool]:
    """Other processes than those of other tests."""
    found = Pool(pool.templates)
    yield found
    found.end_workers()


def sums(pool: Pool) -> list[int]:
    pool.outcomes.clear()
    return [found["sum"] for found in pool.launch(2, together).values()]


def test_ranks_are_processes_with_hashes_of_their_own_that_are_used_again(own: Pool) -> None:
    first, second = (own.launch(2, together)[rank] for rank in (0, 1))
    assert first["hash"] != second["hash"]
    assert len({first["process"], second["process"], os.getpid()}) == 3
    assert first["threads"] == second["threads"] == 1
    own.outcomes.clear()
    assert own.launch(2, together) == {0: first, 1: second}


def test_a_rank_that_hangs_is_named_with_its_line(own: Pool) -> None:
    for _ in range(2):  # the second time from what is known
        with pytest.raises(AssertionError) as caught:
            own.launch(2, one_hangs, limit_s=2.0)
        message = str(caught.value)
        assert message.startswith(
            "scenario tests.processes.test_pool.one_hangs() of 2 ranks:\nrank 1 hangs after 2 s, at\n"
        )
        line = one_hangs.__code__.co_firstlineno + 3
        assert f'test_pool.py", line {line} in one_hangs' in message
    assert sums(own) == [3, 3]


def test_a_rank_that_dies_is_named(own: Pool) -> None:
    with pytest.raises(AssertionError, match=r"one_dies\(\) of 2 ranks:\nrank 0 ended with status -9; it wrote\n"):
        own.launch(2, one_dies)
    own.outcomes.clear()
    assert own.launch(2, one_dies, ends={0}) == {1: "survived"}
    own.outcomes.clear()
    with pytest.raises(AssertionError, match="rank 1 did not end"):
        own.launch(2, one_dies, ends={0, 1})
    assert sums(own) == [3, 3]


def test_what_a_rank_raises_is_told(own: Pool) -> None:
    with pytest.raises(
        AssertionError, match=r"(?s)rank 0 raised\nTraceback.*in one_raises.*ArithmeticError: on purpose"
    ):
        own.launch(2, one_raises)
    assert sums(own) == [3, 3]


def test_no_process_outlives_the_one_that_started_it() -> None:
    """Not even where the latter is killed while a rank hangs."""
    script = (
        "from tests.processes.test_pool import one_hangs\nfrom tests.support.pool import Pool\n"
        "pool = Pool()\nprint(*(w.pid for w in pool.ready(2).values()), flush=True)\npool.launch(2, one_hangs)"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(1.0)
        parent.kill()
    deadline = time.monotonic() + 20.0
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
