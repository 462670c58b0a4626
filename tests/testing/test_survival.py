"""Replicas of which processes are killed: those that are left train on, in all bits as without it; what does not go on
is refused by name. Random moments are benchmarks/proofs/survival.py's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.proofs import survival
from tests.support.pool import Launch
from tests.testing import survival_worker
from zbfx.comm.seats import Seat, seats_of
from zbfx.errors import ZbfxError

STEPS = 6
KILLS: dict[str, survival.Kills] = {
    "in a forward": ((3, "F1.1", 2),),
    "one after the other": ((3, "B1.2", 1), (0, "W0.1", 3)),
    "between steps": ((0, "optimizer", 1),),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLS)
def test_those_that_are_left_train_on_in_all_bits(launch: Launch, moment: str) -> None:
    undisturbed = launch(4, survival.trained, 2, 2, STEPS, (), False)
    killed = {process for process, _, _ in KILLS[moment]}
    found = launch(4, survival.trained, 2, 2, STEPS, KILLS[moment], ends=killed)
    assert found.keys() == {0, 1, 2, 3} - killed
    for rank, own in found.items():
        assert survival.same(own, undisturbed[rank])
    printed = "\n".join(line for own in found.values() for line in own["printed"])
    for process in killed:
        assert f"replica {process // 2}, rank {process % 2} has ended, and replica {1 - process // 2}, rank" in printed
    assert "runs again" in printed
    assert max(own["seconds"] for own in found.values()) < 15.0


@pytest.mark.slow
def test_shared_parameters_and_weights_by_tokens(launch: Launch) -> None:
    undisturbed = launch(4, survival_worker.by_tokens, None)
    found = launch(4, survival_worker.by_tokens, 3, ends={3})
    for rank, own in found.items():
        assert survival.same(own, undisturbed[rank])


@pytest.mark.slow
def test_after_a_death_all_refuse_together_and_no_sum_outlives_its_step(launch: Launch) -> None:
    found = launch(4, survival_worker.after_a_death, ends={3})
    assert len({tuple(own["losses"]) for own in found.values()}) == 1
    for own in found.values():
        assert own["refused"] == ["InputError"] * 4
        assert own["held"] == 0


@pytest.mark.slow
def test_what_goes_on_and_what_does_not(launch: Launch) -> None:
    found = launch(4, survival_worker.ends, 3, ends={3})
    for own in found.values():
        assert len(own["losses"]) == 3
        assert own["train"]["type"] is None
        assert own["evaluate"]["text"].startswith("evaluate: a process of this pipeline has ended. Those that are left")
        assert own["closed"]["text"].startswith("this step was closed")
    both = launch(4, survival_worker.ends, 1, 3, ends={1, 3})
    for own in both.values():
        assert len(own["losses"]) == 1
        assert own["train"]["type"] == "PipelineFault"
        assert "all processes of rank 1 have ended, and its parameters are lost with them" in own["train"]["text"]
    replica = launch(4, survival_worker.ends, 2, 3, ends={2, 3})
    assert all("replica 1 have ended, and its batches are lost" in own["train"]["text"] for own in replica.values())


@pytest.mark.slow
def test_a_process_that_is_late_is_waited_for_once_more(launch: Launch) -> None:
    found = launch(4, survival_worker.late, ends={3})
    assert len({tuple(own["losses"]) for own in found.values()}) == 1
    assert {own["generation"] for own in found.values()} == {2}


@pytest.mark.slow
def test_those_that_were_in_different_calls_go_on_together(launch: Launch) -> None:
    found = launch(4, survival_worker.between_two_calls, ends={3})
    assert len({tuple(losses) for losses in found.values()}) == 1


@pytest.mark.slow
def test_a_seat_has_the_buffers_of_the_checkpoint_that_was_loaded(launch: Launch, tmp_path: Path) -> None:
    undisturbed = launch(4, survival_worker.after_a_load, str(tmp_path / "undisturbed"), -1)
    found = launch(4, survival_worker.after_a_load, str(tmp_path / "killed"), 3, ends={3})
    assert found.keys() == {0, 1, 2}
    for rank, own in found.items():
        assert survival.same(own, undisturbed[rank])


@pytest.mark.slow
def test_an_error_ends_all(launch: Launch) -> None:
    said = "replica 1, rank 1, step 1, action B1.0 (stage 1, microbatch 0): InjectedError: on purpose"
    assert {found["text"] for found in launch(4, survival_worker.raises).values()} == {said}


@pytest.mark.slow
def test_what_cannot_survive_is_refused(launch: Launch) -> None:
    for found in launch(4, survival_worker.refused).values():
        assert "found zero=1, where each process has a part of the optimizer's state alone" in found["zero"]["text"]
        assert "found on_nonfinite='drop'" in found["nonfinite"]["text"]
        assert "survive is True or False; found 1" in found["no bool"]["text"]
        assert "found one replica" in found["one replica"]["text"]
        assert "use the optimizer as it is, without PostValidated" in found["validated"]["text"]
        assert found["other shapes"]["type"] == "InputError"
        assert found["after it"] > 0


def test_seats_go_to_processes_of_the_same_rank_that_have_fewest() -> None:
    replicas = ((0, 1), (2, 3), (4, 5))
    own = {Seat(d, r): process for d, replica in enumerate(replicas) for r, process in enumerate(replica)}
    assert seats_of(replicas, range(6)) == own
    assert seats_of(replicas, [1, 2, 3, 4, 5]) == own | {Seat(0, 0): 2}
    assert seats_of(replicas, [0, 3, 4]) == {
        Seat(0, 0): 0,
        Seat(0, 1): 3,
        Seat(1, 0): 0,
        Seat(1, 1): 3,
        Seat(2, 0): 4,
        Seat(2, 1): 3,
    }
    with pytest.raises(ZbfxError, match="all processes of rank 0 have ended"):
        seats_of(replicas, [1, 3, 5])
    with pytest.raises(ZbfxError, match="all processes of replica 2 have ended"):
        seats_of(replicas, [0, 1, 2, 3])
