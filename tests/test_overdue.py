"""Ending a process whose device waits for ever, with marks and times of the test's own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from zbfx import overdue
from zbfx.overdue import Overdue


class Mark:
    """A place on a stream that the device reaches once the test says so."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


class Watched:
    """What a watch finds and says; `said` is set as it ends the process."""

    def __init__(self, timeout_s: float) -> None:
        self.marks: list[Mark] = []
        self.failed: str | None = None
        self.reasons: list[str] = []
        self.said = threading.Event()
        self.watch = Overdue("rank 0", timedelta(seconds=timeout_s), lambda: self.failed, self.mark, self.end)

    def mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]

    def end(self, reason: str) -> None:
        self.reasons.append(reason)
        self.said.set()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Watched]:
    monkeypatch.setattr(overdue, "POLL_S", 0.01)
    monkeypatch.setattr(overdue, "GRACE_S", 0.1)
    return Watched


def test_a_device_that_waits_for_a_failed_rank(watched: Callable[[float], Watched]) -> None:
    found = watched(60.0)
    with found.watch.step():
        pass
    assert not found.said.wait(0.3)
    found.failed = "rank 1: ZeroDivisionError"
    assert found.said.wait(5.0)
    assert found.reasons == ["rank 0 ends, for its device waits for a rank that has failed. rank 1: ZeroDivisionError"]


def test_a_device_that_waits_for_too_long(watched: Callable[[float], Watched]) -> None:
    found = watched(0.4)
    with found.watch.step():
        pass
    assert found.said.wait(5.0)
    assert found.reasons == [
        "rank 0 ends: its device has waited in a step for other ranks for 0 s. bind(timeout_s=...) allows 0.4 s; did "
        "every rank make the same calls?"
    ]


def test_a_host_that_waits_inside_a_step(watched: Callable[[float], Watched]) -> None:
    found = watched(0.3)
    with found.watch.step():
        assert found.said.wait(5.0)


def test_many_steps_may_be_queued(watched: Callable[[float], Watched]) -> None:
    """The timeout counts from when the device got through the step before, not from when a step was queued."""
    found = watched(0.5)
    for _ in range(8):
        with found.watch.step():
            pass
    for mark in found.marks:
        assert not found.said.wait(0.2)
        mark.reached = True
    assert not found.said.wait(1.0)
    assert not found.watch.steps


def test_a_closed_watch_says_nothing(watched: Callable[[float], Watched]) -> None:
    found = watched(0.2)
    with found.watch.step():
        pass
    found.watch.close()
    assert not found.said.wait(0.6)


def test_the_process_ends() -> None:
    code = "from zbfx.overdue import end_process; print('before', end=''); end_process('rank 0 ends'); print('after')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "before", "zbfx: rank 0 ends\n")
