"""Ranks whose batches differ after the first one hear of it, with rank, step and argument."""

from __future__ import annotations

import pytest

from tests.processes import batches_worker
from tests.support.pool import Launch


@pytest.mark.parametrize(("case", "step"), [("second", 4), ("each", 3)])
def test_a_batch_that_differs_ends_the_pipeline(launch: Launch, case: str, step: int) -> None:
    texts = set()
    for ranks in launch(2, batches_worker.others).values():
        found = ranks[case]
        assert found["type"] == "PipelineFault"
        assert found["step"] in (step, step + 1)
        texts.add(found["text"])
    (text,) = texts
    other = "rank 0" if text.startswith("rank 1") else "rank 1"
    assert f"was given other values of targets[0] than {other} in step {step}" in text


@pytest.mark.parametrize("case", ["not looked at", "never"])
def test_batches_between_are_not_compared(launch: Launch, case: str) -> None:
    for ranks in launch(2, batches_worker.others).values():
        assert ranks[case]["type"] is None
        assert ranks[case]["step"] == 6


def test_how_often_is_a_whole_number_and_the_same_on_all_ranks(launch: Launch) -> None:
    for ranks in launch(2, batches_worker.others).values():
        assert "check_batches=N compares the batches of ranks in every Nth step" in ranks["wrong"]
        assert "check_batches is 1 on rank 0, 2 on rank 1" in ranks["apart"]


def test_replicas_have_batches_of_their_own(launch: Launch) -> None:
    for found in launch(4, batches_worker.of_replicas).values():
        assert found["type"] == "PipelineFault"
        assert "was given other values of targets[0] than replica 1, rank" in found["text"]
