"""Models with DTensor parameters: a Llama as 2 replicas x 2 ranks x 2 shards over gloo equals plain autograd."""

from __future__ import annotations

import pytest

from tests.processes.tensor_parallel_worker import compiled_alone, digests, two_by_two_by_two
from tests.processes.test_processes import refusals
from tests.support.pool import Launch


def test_losses_and_gradients_equal_plain_autograd(launch: Launch) -> None:
    for found in launch(8, two_by_two_by_two).values():
        assert found["sharded"] == 7, "seven matrices in this rank's layer"
        assert max(found["errors"].values()) < 1e-12
        assert len(found["losses"]) == 20
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-12)
        assert found["losses"][-1] < 0.9 * found["losses"][0]


def test_collectives_are_nodes_of_the_phases(launch: Launch) -> None:
    """Two sums a layer in F; in B the sums of the gradients that enter attention and MLP."""
    for found in launch(8, compiled_alone).values():
        assert found["collectives"] == {"P": 0, "F": 2, "B": 5, "W": 0}


def test_what_runs_in_one_process_is_refused(launch: Launch) -> None:
    results = launch(8, compiled_alone)
    for message in refusals(results, "measure", "ZbfxError"):
        assert "use costs='estimate' or a CostTable" in message
    for message in refusals(results, "check", "ZbfxError"):
        assert "before its parameters are distributed" in message


def test_digests_are_those_of_the_plan_alone(launch: Launch) -> None:
    """In processes that were started, with other addresses, hashes of strings and groups to shard over: of one shard,
    all ranks of all replicas have equal digests, of every part; and other models have others."""
    found = launch(8, digests)
    for shard in (0, 1):
        ranks = [found[rank] for rank in found if rank % 2 == shard]
        assert all(ranks[0] == other for other in ranks[1:])
    assert len({digest["the model or its loss"] for digest in found[0].values()}) == len(found[0])
