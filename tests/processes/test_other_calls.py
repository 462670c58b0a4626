"""Ranks that make different calls hear of it soon, ranks that are slow do not; the watch itself is tested in
tests/comm/test_history.py."""

from __future__ import annotations

import pytest

from tests.processes import other_calls as calls
from tests.processes.other_calls import COMPARE_S
from tests.support.pool import Launch, Scenario
from zbfx.comm.history import CLOSE

ALIKE = (
    "ranks made different calls, but every rank makes the same calls in the same order, compile and evaluate among "
    "them, with batches of the same shapes; found for call"
)
SOON_S = COMPARE_S + 4.0  # on busy cores
FEWER = (calls.one_step_fewer, calls.one_step_fewer_late)
WHOLE, SMALL = ("inputs[0] (6, 8), targets[0] (6, 8)", "inputs[0] (3, 8), targets[0] (3, 8)")

OTHER_CALLS = [
    (calls.one_evaluates, 3, 1, f"evaluate with {WHOLE}", f"step 2 with {WHOLE}"),
    (calls.one_steps, 3, 1, f"step 2 with {WHOLE}", f"evaluate with {WHOLE}"),
    (calls.new_shapes, 3, 2, f"step 2 with {SMALL}", f"step 2 with {WHOLE}"),
    (calls.known_shapes, 4, 2, f"step 3 with {WHOLE}", f"step 3 with {SMALL}"),
    (calls.one_step_fewer, 3, 0, CLOSE, f"step 2 with {WHOLE}"),
    (calls.one_step_fewer_late, 3, 0, CLOSE, f"step 2 with {WHOLE}"),
    (calls.one_profiles, 3, 0, "profile", f"step 2 with {WHOLE}"),
    (calls.one_trains, 5, 1, f"step 3 with {WHOLE}", "optimizer.step"),
]


@pytest.mark.parametrize(
    ("scenario", "number", "rank", "own", "others"), OTHER_CALLS, ids=[row[0].__name__ for row in OTHER_CALLS]
)
def test_every_rank_hears_what_each_called(
    launch: Launch, scenario: Scenario, number: int, rank: int, own: str, others: str
) -> None:
    found = [result for k, result in launch(3, scenario).items() if k != 0 or scenario not in FEWER]
    possible = [
        f"{ALIKE} {number} of this pipeline " + "; ".join(sorted((f"rank {rank}: {own}", f"rank {other}: {others}")))
        for other in range(3)
        if other != rank
    ]
    assert found[0]["text"] in possible
    assert {(error["type"], error["text"]) for error in found} == {("PipelineFault", found[0]["text"])}
    assert max(error["seconds"] for error in found) < SOON_S


def test_a_rank_that_closes_its_step_goes_on(launch: Launch) -> None:
    assert [launch(3, scenario)[0]["type"] for scenario in FEWER] == [None, None]


def test_the_first_call_of_a_kind_is_compared_at_once(launch: Launch) -> None:
    for found in launch(3, calls.first_call).values():
        assert found["type"] == "PipelineFault"
        assert found["text"] == (
            "ranks made different calls, but every rank makes the same calls in the same order, compile and evaluate "
            "among them; found rank 0: call 1, step 1, rank 1: call 1, evaluate, rank 2: call 1, step 1"
        )
        assert found["seconds"] < SOON_S


def test_a_step_after_other_calls_says_so(launch: Launch) -> None:
    for found in launch(3, calls.one_evaluates).values():
        assert "has failed before" in found["after"]["text"]
        assert f"{ALIKE} 3 of this pipeline" in found["after"]["text"]


def test_ranks_that_call_the_same_with_other_numbers_hear_of_it(launch: Launch) -> None:
    found = launch(3, calls.other_arguments)
    state = "{'_growth_tracker': 0, 'backoff_factor': 0.5, 'growth_factor': 2.0, 'growth_interval': 2000"
    at_once = {
        "seed": "bind: all ranks pass the same arguments; found seed is 3 on rank 0, 4 on rank 1",
        "max_norm": "PostValidated: all ranks pass the same arguments; found max_norm is 1.0 on rank 0, 2.0 on rank 2",
        "max_norm of one": "PostValidated: all ranks pass the same arguments; found max_norm is None on rank 0, 1.0 on "
        "rank 1",
        "grad_scaler": "PostValidated: all ranks pass the same arguments; found grad_scaler is "
        f"{state}, 'scale': 1.0}} on rank 0, {state}, 'scale': 2.0}} on rank 1",
    }
    for rank, results in found.items():
        for case, text in at_once.items():
            assert (results[case]["type"], results[case]["text"]) == ("ZbfxError", text)
        wrong = "PostValidated wraps an optimizer of torch, or a list of them; found Step"
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


def test_slow_ranks_that_make_the_same_calls_do_not_differ(launch: Launch) -> None:
    found = launch(3, calls.slow_ranks)
    for rank in range(3):
        assert found[rank]["refused"]["type"] == "InputError"
        assert found[rank]["losses"] == [found[0]["losses"][0]] * 5
        assert found[rank]["told"] == 8  # each of its calls but the refused one was compared
