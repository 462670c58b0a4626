"""Ending a process whose device waits for ever, with a count of steps and with times of the test's own."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest

from zbfx.comm import overdue
from zbfx.comm.overdue import Overdue


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overdue, "POLL_S", 0.01)
    monkeypatch.setattr(overdue, "GRACE_S", 0.1)
    monkeypatch.setattr(overdue, "LAST_WORDS_S", 0.3)


class Watched:
    """A watch over steps that the device gets through when the test says so; `said` is set as it ends the process."""

    def __init__(self, timeout_s: float) -> None:
        self.done = 0
        self.failed: str | None = None
        self.reasons: list[str] = []
        self.said = threading.Event()
        timeout = timedelta(seconds=timeout_s)
        self.watch = Overdue("rank 0", timeout, "so much is allowed", lambda: self.done, lambda: self.failed, self.end)

    def end(self, reason: str) -> None:
        self.reasons.append(reason)
        self.said.set()


def test_a_device_that_waits_for_a_failed_rank() -> None:
    found = Watched(60.0)
    found.watch.begin()
    assert not found.said.wait(0.3)
    found.failed = "rank 1: ZeroDivisionError"
    assert found.said.wait(10.0)
    assert found.reasons == ["rank 0 ends, for its device waits for a rank that has failed. rank 1: ZeroDivisionError"]


def test_a_failure_elsewhere_ends_nobody_who_does_not_wait() -> None:
    found = Watched(60.0)
    found.failed = "rank 1: ZeroDivisionError"
    found.watch.begin()
    found.done = 1
    assert not found.said.wait(0.5)


def test_a_device_that_waits_for_too_long() -> None:
    found = Watched(0.4)
    found.watch.begin()
    assert found.said.wait(10.0)
    expected = r"rank 0 ends: its device has waited for other ranks for \d+ s, and so much is allowed\. Did every .*"
    assert re.fullmatch(expected, found.reasons[0])


@pytest.mark.slow
def test_many_steps_may_be_queued() -> None:
    """The timeout counts from when the device got through the step before, not from when a step was queued."""
    found = Watched(2.0)
    for _ in range(8):
        found.watch.begin()
    for done in range(1, 9):
        assert not found.said.wait(0.4)
        found.done = done
    assert not found.said.wait(2.5)


def test_a_closed_watch_says_nothing() -> None:
    found = Watched(0.2)
    found.watch.begin()
    found.watch.close()
    assert not found.said.wait(0.6)


def test_a_watch_closed_while_it_asks_says_nothing() -> None:
    found = Watched(60.0)
    asked = threading.Event()

    def slow_fault() -> str:
        asked.set()
        time.sleep(0.5)
        return "rank 0: known already"

    found.watch.fault = slow_fault
    found.watch.begin()
    assert asked.wait(10.0)
    found.watch.close()
    assert not found.said.wait(1.0)


def test_a_process_that_failed_ends_if_its_device_never_does() -> None:
    found = Watched(60.0)
    found.watch.begin()
    found.watch.failed("rank 0: MemoryError", lambda: False)
    assert found.said.wait(10.0)
    assert found.reasons == [
        "rank 0 ends, for it has failed, and its device waits for messages to come. rank 0: MemoryError"
    ]


def test_a_process_that_failed_goes_on_if_its_device_does() -> None:
    found = Watched(60.0)
    found.watch.failed("rank 0: MemoryError", lambda: True)
    assert not found.said.wait(0.6)


@pytest.mark.processes
@pytest.mark.parametrize("output", ["open", "closed"])
def test_the_process_ends(output: str) -> None:
    before = "print('before', end='')" if output == "open" else "sys.stdout.close()"
    code = (
        f"import sys; from zbfx.comm.overdue import end_process; {before}; end_process('rank 0 ends'); print('after')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    printed = "before" if output == "open" else ""
    assert (done.returncode, done.stdout, done.stderr) == (1, printed, "zbfx: rank 0 ends\n")
