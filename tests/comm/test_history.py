"""Ranks that make different calls hear of it soon, ranks that are slow do not.

Run: pytest tests/comm/test_history.py (CPU; three launches of three processes, see tests/support/other_calls.py).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from tests.processes.test_processes import Results, launch
from tests.support.other_calls import COMPARE_S
from zbfx.comm import history
from zbfx.comm.history import CLOSE, KEPT, History

if TYPE_CHECKING:
    from _typeshed import TraceFunction

ALIKE = (
    "ranks made different calls, but every rank makes the same calls in the same order, compile and evaluate among "
    "them, with batches of the same shapes; found for call"
)
SOON_S = COMPARE_S + 4.0  # on busy cores
WHOLE, SMALL = ("inputs[0] (6, 8), targets[0] (6, 8)", "inputs[0] (3, 8), targets[0] (3, 8)")


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


@pytest.fixture(scope="module")
def other_calls(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(3, "other-calls", tmp_path_factory.mktemp("calls"), {0, 1, 2}, module="tests.support.other_calls")


@pytest.mark.parametrize(
    ("case", "number", "rank", "own", "others"),
    [
        ("step, evaluate", 3, 1, f"evaluate with {WHOLE}", f"step 2 with {WHOLE}"),
        ("evaluate, step", 3, 1, f"step 2 with {WHOLE}", f"evaluate with {WHOLE}"),
        ("new shapes", 3, 2, f"step 2 with {SMALL}", f"step 2 with {WHOLE}"),
        ("known shapes", 4, 2, f"step 3 with {WHOLE}", f"step 3 with {SMALL}"),
        ("one step fewer", 3, 0, CLOSE, f"step 2 with {WHOLE}"),
        ("one step fewer, late", 3, 0, CLOSE, f"step 2 with {WHOLE}"),
        ("profile", 3, 0, "profile", f"step 2 with {WHOLE}"),
        ("optimizer", 5, 1, f"step 3 with {WHOLE}", "optimizer.step"),
    ],
)
def test_every_rank_hears_what_each_called(
    other_calls: Results, case: str, number: int, rank: int, own: str, others: str
) -> None:
    found = [other_calls[k][case] for k in range(3) if k != 0 or not case.startswith("one step fewer")]
    possible = [
        f"{ALIKE} {number} of this pipeline " + "; ".join(sorted((f"rank {rank}: {own}", f"rank {other}: {others}")))
        for other in range(3)
        if other != rank
    ]
    assert found[0]["text"] in possible
    assert {(error["type"], error["text"]) for error in found} == {("PipelineFault", found[0]["text"])}
    assert max(error["seconds"] for error in found) < SOON_S


def test_a_rank_that_closes_its_step_goes_on(other_calls: Results) -> None:
    assert other_calls[0]["one step fewer"]["type"] is None
    assert other_calls[0]["one step fewer, late"]["type"] is None


def test_the_first_call_of_a_kind_is_compared_at_once(other_calls: Results) -> None:
    for found in other_calls.values():
        assert found["first"]["type"] == "PipelineFault"
        assert found["first"]["text"] == (
            "ranks made different calls, but every rank makes the same calls in the same order, compile and evaluate "
            "among them; found rank 0: call 1, step 1, rank 1: call 1, evaluate, rank 2: call 1, step 1"
        )
        assert found["first"]["seconds"] < SOON_S


def test_a_step_after_other_calls_says_so(other_calls: Results) -> None:
    for found in other_calls.values():
        assert "has failed before" in found["after"]["text"]
        assert f"{ALIKE} 3 of this pipeline" in found["after"]["text"]


def test_ranks_that_call_the_same_with_other_numbers_hear_of_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = launch(
        3, "other-arguments", tmp_path_factory.mktemp("arguments"), {0, 1, 2}, module="tests.support.other_calls"
    )
    state = "'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}"
    at_once = {
        "seed": "bind: all ranks pass the same arguments; found seed is 3 on rank 0, 4 on rank 1",
        "max_norm": "PostValidated: all ranks pass the same arguments; found max_norm is 1.0 on rank 0, 2.0 on rank 2",
        "max_norm of one": "PostValidated: all ranks pass the same arguments; found max_norm is None on rank 0, 1.0 on "
        "rank 1",
        "grad_scaler": "PostValidated: all ranks pass the same arguments; found grad_scaler is "
        f"{{'scale': 1.0, {state} on rank 0, {{'scale': 2.0, {state} on rank 1",
    }
    for rank, results in found.items():
        for case, text in at_once.items():
            assert (results[case]["type"], results[case]["text"]) == ("ZbfxError", text)
        wrong = "PostValidated wraps an optimizer of torch; found Step"
        assert results["wrong on one"]["text"] == (wrong if rank == 1 else f"rank 1: {wrong}")
        assert results["loss"] == found[0]["loss"] > 0.0
        first = "found rank 0: call 1, step 1, rank 1: call 1, step 8, rank 2: call 1, step 1"
        assert results["count"]["text"].endswith(first)
        assert results["count, later"]["type"] == results["divide_by"]["type"] == "PipelineFault"
        for k in ("count, later", "divide_by"):
            assert results[k]["seconds"] < SOON_S
        assert f"{ALIKE} 3 of this pipeline" in results["count, later"]["text"]
        assert f"rank 2: step 8 with {WHOLE}" in results["count, later"]["text"]
        assert f"step 2 with {WHOLE}" in results["count, later"]["text"]
        assert "rank 0: optimizer.step of gradients divided by 2.0; rank " in results["divide_by"]["text"]
        assert results["divide_by"]["text"].endswith(": optimizer.step")


def test_slow_ranks_that_make_the_same_calls_do_not_differ(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = launch(3, "slow-ranks", tmp_path_factory.mktemp("slow"), {0, 1, 2}, module="tests.support.other_calls")
    for rank in range(3):
        assert found[rank]["refused"]["type"] == "InputError"
        assert found[rank]["losses"] == [found[0]["losses"][0]] * 5
        assert found[rank]["told"] == 8  # each of its calls but the refused one was compared
