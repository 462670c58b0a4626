"""Processes that stay from call to call."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.kept import Kept, over_processes

pytestmark = pytest.mark.processes


def behaves(how: str) -> str:
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        time.sleep(100)
    return f"{how} {os.getpid()}"


def failed(how: str, text: str) -> str:
    return f"{how}: {text}"


@pytest.mark.timeout(60)
def test_calls_that_die_or_hang_are_told_and_the_others_end_in_processes_that_stay() -> None:
    found = sorted(over_processes(behaves, ["ok", "dies", "ok", "hangs", "ok", "ok"], 1, 5.0, failed))
    assert found[:2] == ["dies: the process ended with status -9", "hangs: hangs: no result within 5 s"]
    assert [text.split()[0] for text in found[2:]] == ["ok"] * 4
    assert len(set(found[2:])) == 3  # one before the death, one before the hang, one that stayed for two calls


@pytest.mark.timeout(60)
def test_closing_early_ends_all_processes() -> None:
    with closing(over_processes(behaves, ["ok", "hangs"], 2, 50.0, failed)) as results:
        pid = int(next(results).split()[1])
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


STARTED: list[Kept] = []  # a process ends once nothing refers to it


def starts_another(_: None) -> int:
    own = Kept.start()
    STARTED.append(own)
    own.ask(behaves, "ok")
    pid = int(own.connection.recv().split()[1])
    own.ask(behaves, "hangs")
    return pid


@pytest.mark.timeout(60)
def test_ending_a_process_that_leads_ends_what_it_has_started() -> None:
    leader = Kept.start(leads=True)
    leader.ask(starts_another, None)
    pid = leader.connection.recv()
    assert is_running(pid)
    leader.end()
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Not so one that has ended and for which nobody waits."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
