"""Where a model's trained values are on several ranks, no way to ask one rank for all of them gives old ones."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.processes import left_behind_worker
from tests.support.models import mlp
from tests.support.pool import Launch
from tests.support.reference import compiled
from zbfx import ZbfxError
from zbfx.optim import PostValidated

WAYS = ("state_dict", "of a part", "of a whole around it", "deepcopy", "save", "averaged")
MIXED = "would mix trained values and old ones: other ranks have those of"


@pytest.mark.parametrize("rank", [0, 1])
def test_every_way_to_ask_for_the_whole_is_refused_once_ranks_have_trained(launch: Launch, rank: int) -> None:
    found = launch(2, left_behind_worker.asked_for)[rank]
    works = dict.fromkeys(WAYS, "")
    assert found["before"] == found["loaded"] == found["copied"] == works
    for case in ("trained", "trained on", "closed"):
        for way in WAYS:
            text = found[case][way]
            if way == "of a part" and rank == 0:
                assert text == ""  # it is the first rank's own
                continue
            assert MIXED in text
            assert "Call step.full_state_dict(), on all ranks" in text
    assert ("2.0.weight" if rank == 0 else "0.0.weight") in found["trained"]["state_dict"]
    assert found["own"] == found["run before"] == ""
    assert "this forward of Linear would mix trained values and old ones" in found["run"].pop("whole")
    assert set(found["run"].values()) == {""}
    assert found["same"]
    assert len(found["losses"]) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_another_cut_starts_from_no_old_values(launch: Launch, rank: int) -> None:
    found = launch(2, left_behind_worker.bound_again)[rank]
    assert found["other"]["type"] == "ZbfxError"
    assert "has trained 4.bias, 4.weight, 6.bias, ... and 1 more on other ranks" in found["other"]["text"]
    assert "would start from their old values here" in found["local"]
    assert found["same"] == ""
    assert found["losses"] == pytest.approx(found["plain"][:2], rel=1e-5)


def test_a_tied_weight_is_refused_only_where_it_is_old(launch: Launch) -> None:
    for found in launch(2, left_behind_worker.tied).values():
        assert MIXED in found["state_dict"]
        assert "wte" not in found["state_dict"]
        assert "lm_head" not in found["state_dict"]
        assert found["loaded"] == ""


def test_each_rank_averages_what_it_has(launch: Launch) -> None:
    ranks = launch(2, left_behind_worker.averaged)
    assert sorted(name for found in ranks.values() for name in found) == sorted(
        f"{layer}.{kind}" for layer in range(0, 12, 2) for kind in ("weight", "bias")
    )
    assert max(error for found in ranks.values() for error in found.values()) < 1e-6


def test_values_that_are_not_final_are_refused(launch: Launch) -> None:
    for found in launch(2, left_behind_worker.unsettled).values():
        assert found["bound"] == found["collected"] == found["run"] == ""
        assert "would not have its final values: with zero=1" in found["stepped"]
        assert "Call step.collect(), on all ranks, before" in found["stepped"]


def test_values_that_wait_for_a_verdict_are_refused_in_one_process_too() -> None:
    problem = mlp(3)
    step = compiled(problem, 2, 3, check=False).run_local()
    optimizer = PostValidated(torch.optim.SGD(step.parameters(), lr=0.1), step, max_norm=1.0)
    step(*problem.inputs, *problem.targets)
    copy.deepcopy(problem.model).state_dict()
    optimizer.step()
    for ask in (problem.model.state_dict, lambda: copy.deepcopy(problem.model)):
        with pytest.raises(ZbfxError, match=r"waits for its verdict. Call optimizer.settle\(\), on all ranks, before"):
            ask()
    optimizer.settle()
    problem.model.state_dict()
