"""Ranks that make different calls hear of it, on two ranks of one process; tests/processes has real ones."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from zbfx.comm import history
from zbfx.comm.history import CLOSE, KEPT, History

if TYPE_CHECKING:
    from _typeshed import TraceFunction

ALIKE = (
    "ranks made different calls, but every rank makes the same calls in the same order, compile and evaluate among "
    "them, with batches of the same shapes; found for call"
)


class Ranks:
    """The histories of two ranks of one process, and what their threads are told."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.reasons: list[str] = []
        self.said = threading.Event()
        self.ranks = [History(f"rank {rank}", self.store, lambda: self.differ) for rank in range(2)]

    def differ(self, reason: str) -> None:
        self.reasons.append(reason)
        self.said.set()


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(history, "LOOK_S", 0.01)
    monkeypatch.setattr(history, "COMPARE_S", 0.1)
    found = Ranks()
    yield found
    for rank in found.ranks:
        rank.close()


def test_the_tag_is_that_of_the_call(two: Ranks) -> None:
    first, other = two.ranks
    tags = []
    for kind, shapes in (("step", (4, 8)), ("step", (4, 8)), ("step", (8, 8)), ("evaluate", (8, 8))):
        for rank in two.ranks:
            rank.begin(kind, batch=True)
            tags.append(rank.tag)
            rank.given({"inputs[0]": shapes})
            tags.append(rank.tag)
    assert tags[::4] == tags[2::4]
    assert tags[1::4] == tags[3::4]
    assert len({0, *tags}) == 9
    assert all(0 <= tag < 2**31 for tag in tags)
    other.begin("step")
    first.begin("evaluate")
    assert first.tag != other.tag


def test_calls_in_quick_succession_are_not_told(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "COMPARE_S", 60.0)
    first = two.ranks[0]
    for _ in range(100):
        first.begin("step")
        time.sleep(0.001)
    assert first.told == 0
    assert two.store.num_keys() == 0


def test_a_difference_some_calls_ago_is_found(two: Ranks) -> None:
    first, other = two.ranks
    for kind in ("step", "step", "optimizer.step", "step"):
        first.begin(kind)
    for kind in ("step", "evaluate"):
        other.begin(kind)
    assert two.said.wait(10.0)
    assert two.reasons == [f"{ALIKE} 2 of this pipeline rank 0: step; rank 1: evaluate"]


@pytest.mark.slow
def test_a_rank_that_is_ahead_or_has_a_batch_unknown_or_refused_does_not_differ(two: Ranks) -> None:
    first, other = two.ranks
    for size in (1, 2):
        first.begin("step", batch=True)
        first.given({"inputs[0]": (size, 8)})
    other.begin("step", batch=True)
    time.sleep(0.5)
    assert (first.told, other.told) == (2, 0)
    other.given({"inputs[0]": (1, 8)})
    time.sleep(0.5)
    assert other.told == 1
    for size, rank in enumerate(two.ranks):
        rank.begin("step", batch=True)
        rank.given({"inputs[0]": (size, 9)})
        rank.refused()
        rank.begin("close")
        time.sleep(0.5)
    assert (first.told, two.reasons) == (4, [])


def test_a_rank_whose_batch_is_not_known_hears_of_another_call(two: Ranks) -> None:
    first, other = two.ranks
    first.begin("optimizer.step")
    time.sleep(0.3)
    assert first.told == 1
    other.begin("step", batch=True)
    assert two.said.wait(10.0)
    assert two.reasons == [f"{ALIKE} 1 of this pipeline rank 0: optimizer.step; rank 1: step"]


def test_the_store_keeps_few_calls(two: Ranks) -> None:
    for number in range(1, 100):
        for rank in two.ranks:
            rank.begin("step")
            assert rank.difference() is None
        assert two.store.num_keys() == min(number, 2 * KEPT)


def test_a_rank_that_ends_closes(two: Ranks) -> None:
    first, other = two.ranks
    for rank in two.ranks:
        rank.begin("step")
    first.end()
    assert other.difference() is None
    other.begin("step")
    assert two.said.wait(10.0)
    assert two.reasons == [f"{ALIKE} 2 of this pipeline rank 0: close, or the end of its process; rank 1: step"]


def test_ranks_that_close_and_end_do_not_differ(two: Ranks) -> None:
    first, other = two.ranks
    first.begin(CLOSE)
    assert first.difference() is None
    first.close()
    for rank in two.ranks:
        rank.end()
    assert two.store.get("call 1").decode() == f"rank 0: {CLOSE}"
    assert two.store.num_keys() == 1
    assert (other.told, two.reasons) == (1, [])


def test_a_fork_that_ends_says_nothing(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = two.ranks
    first.begin("step")
    monkeypatch.setattr("os.getpid", lambda: first.process + 1)
    first.end()
    assert two.store.num_keys() == 0
    monkeypatch.undo()
    first.end()
    assert two.store.get("call 2").decode() == f"rank 0: {CLOSE}"


def test_a_finalizer_may_close_inside_the_watch(two: Ranks) -> None:
    """As where the thread that watches collects garbage in the middle of its own code."""
    first, _ = two.ranks
    ended = threading.Event()
    events: list[str] = []

    def collects(frame: FrameType, event: str, argument: Any) -> TraceFunction:
        events.append(event)
        if len(events) > 8:
            first.close()
        return collects

    def watch() -> None:
        sys.settrace(collects)
        first.watch()
        sys.settrace(None)
        ended.set()

    first.begin("step")
    threading.Thread(target=watch, daemon=True).start()
    assert ended.wait(10.0)
    assert len(events) > 8


def test_a_closed_history_says_nothing(two: Ranks) -> None:
    two.ranks[0].begin("step")
    two.ranks[1].begin("evaluate")
    for rank in two.ranks:
        rank.close()
    assert not two.said.wait(0.5)
