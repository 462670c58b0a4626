"""Steps of unlike microbatches over two replicas of two ranks, in float64: each replica has another number of them."""

from __future__ import annotations

import pytest

from tests.processes import unlike_worker
from tests.processes.unlike_worker import RANKS, REPLICAS
from tests.support.pool import Launch


@pytest.mark.parametrize("way", ["plain", "zero", "validated"])
def test_replicas_with_other_numbers_of_microbatches(launch: Launch, way: str) -> None:
    for results in launch(REPLICAS * RANKS, unlike_worker.trained).values():
        assert max(results[way].values()) < 1e-10, results[way]


def test_what_one_rank_refuses_all_refuse(launch: Launch) -> None:
    found = launch(REPLICAS * RANKS, unlike_worker.trained)
    for rank, results in found.items():
        expected = "expected dtype torch.float64 as in the example microbatch, found torch.int64"
        assert expected in results["refused"]["text"]
        assert "run_split takes a list of" in results["empty"]["text"]
        assert results["empty"]["type"] == "InputError"
        assert ("refused its batch" in results["refused"]["text"]) == (rank != 2)
        assert "all ranks of a pipeline take the same microbatches; found 1 on" in results["others"]["text"]


def test_padded_microbatches_of_replicas(launch: Launch) -> None:
    for rank, results in launch(REPLICAS * RANKS, unlike_worker.bucketed).items():
        assert len(results["errors"]) > 1
        assert max(results["errors"].values()) < 1e-12, results["errors"]
        assert results["other"]["type"] == "InputError"
        assert "run_split takes a list of" in results["other"]["text"]
        assert ("refused its batch" in results["other"]["text"]) == (rank != 2)
        for refused in results["refused"]:
            assert refused["type"] == "InputError"
            assert "padding changes the loss" in refused["text"]
        assert results["count"] == 1
