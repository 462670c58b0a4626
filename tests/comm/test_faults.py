"""What a rank does once it has failed: it says so first, and then lets go of its connections, which may wait for ever
on a device that is broken. Those are fakes here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zbfx import PipelineFault
from zbfx._torch.compiling import inductor
from zbfx.comm import channels
from zbfx.comm.channels import Channels
from zbfx.comm.faults import Uncaught, is_gone, known_fault
from zbfx.comm.history import History
from zbfx.comm.overdue import ends_within
from zbfx.comm.place import find_place
from zbfx.comm.together import waiting


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is printed, and why the process would end, in order."""
    found: list[str] = []
    monkeypatch.setattr(channels, "say", lambda text: found.append(f"said {text}"))
    monkeypatch.setattr(channels, "end_process", lambda reason: found.append(f"ended {reason}"))
    monkeypatch.setattr(channels, "CLOSE_S", 0.5)
    return found


@pytest.fixture
def connected() -> Iterator[Channels]:
    """The connections of a pipeline with one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Channels(find_place(1, None), torch.device("cpu"), timedelta(seconds=5))
    dist.destroy_process_group()


def test_groups_that_cannot_be_destroyed_end_the_process_with_the_message(
    monkeypatch: pytest.MonkeyPatch, connected: Channels, events: list[str]
) -> None:
    monkeypatch.setattr(dist, "destroy_process_group", lambda *_: time.sleep(3))
    begun = time.monotonic()
    connected.fail(ArithmeticError("on purpose"))
    assert time.monotonic() - begun < 2.0
    assert events == [
        "said rank 0: ArithmeticError: on purpose",
        "ended rank 0 ends, for it has failed, and its connections do not close. rank 0: ArithmeticError: on purpose",
    ]
    monkeypatch.undo()


def test_what_is_on_its_way_may_fail_too(connected: Channels, events: list[str]) -> None:
    def let_go() -> None:
        events.append("let go")
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    assert connected.fail(ArithmeticError("on purpose"), let_go) == "rank 0: ArithmeticError: on purpose"
    assert events == ["said rank 0: ArithmeticError: on purpose", "let go"]
    assert not connected.are_open()


def test_the_first_message_is_that_of_all(connected: Channels, events: list[str]) -> None:
    connected.history.first_fault("rank 1: MemoryError")
    fault = PipelineFault("rank 0: waiting for rank 1, which is lost", waited=True)
    assert connected.fail(fault) == "rank 1: MemoryError"
    assert events == ["said rank 1: MemoryError"]


def test_an_exception_that_nobody_catches_is_told(connected: Channels, events: list[str]) -> None:
    sys.excepthook(ArithmeticError, ArithmeticError("on purpose"), None)
    assert events == ["said rank 0, outside of its calls: ArithmeticError: on purpose"]
    assert connected.history.known_fault() == "rank 0, outside of its calls: ArithmeticError: on purpose"


def test_hooks_are_taken_back() -> None:
    before, told = sys.excepthook, list[BaseException]()
    try:
        sys.excepthook = lambda *_: None
        inner = sys.excepthook
        hook = Uncaught(lambda: told.append)
        sys.excepthook(ValueError, ValueError("1"), None)
        later = Uncaught(lambda: None)
        hook.forget()  # not the last: it stays, and calls nothing
        sys.excepthook(ValueError, ValueError("2"), None)
        later.forget()
        assert sys.excepthook is hook
        hook.forget()
        assert sys.excepthook is inner
    finally:
        sys.excepthook = before
    assert [str(error) for error in told] == ["1"]


def test_work_that_does_not_end_is_left_alone() -> None:
    def fail() -> None:
        raise RuntimeError

    assert ends_within(5.0, lambda: None)
    assert ends_within(5.0, fail)
    assert not ends_within(0.1, lambda: time.sleep(1.0))


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_errors_of_the_own_device_are_not_those_of_other_ranks(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="on purpose"), waiting("rank 0", "rank 1"):
        raise kind("on purpose")
    with pytest.raises(PipelineFault, match="waiting for rank 1 is lost"), waiting("rank 0", "rank 1"):
        raise RuntimeError("connection closed")


@pytest.mark.processes
def test_a_process_that_was_killed_is_a_failure() -> None:
    store = dist.HashStore()
    own, others = (History(f"rank {rank}", store, lambda: None) for rank in range(2))
    other = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    processes = {"rank 0": os.getpid(), "rank 1": other.pid}
    assert known_fault(own, processes) is None
    other.kill()
    for _ in range(100):
        if is_gone(other.pid):
            break
        time.sleep(0.05)
    others.leave()
    assert known_fault(own, processes) is None, "it had taken leave"
    store.delete_key("rank 1 left")
    assert known_fault(own, processes) == "rank 1: its process has ended"  # its parent has not waited for it
    other.communicate()
    assert is_gone(other.pid)
    assert own.known_fault() == "rank 1: its process has ended"


CODE = """
import atexit, time
from zbfx.comm import overdue
atexit.register(time.sleep, 60)
overdue.EXIT_S = 1
{call}
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_has_failed_ends_though_destructors_wait() -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CODE.format(call="overdue.bound_exit()")], timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM
    assert time.monotonic() - begun < 50


@pytest.mark.slow
@pytest.mark.inductor
def test_compiled_kernels_do_not_hold_the_lock_as_they_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no thread can end a process that waits for a place in the queue of a device that waits for ever."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch warns of its own modules as it imports them
        from torch._inductor import compile_fx as module
        from torch._inductor import config

    used: list[Any] = []

    def compile_fx(*_: Any) -> Callable[..., Any]:
        used.append((config.use_static_cuda_launcher, torch.is_autocast_enabled("cpu")))
        return lambda box: box

    monkeypatch.setattr(module, "compile_fx", compile_fx)
    inductor(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph()), [])
    assert used == [(False, False)]
