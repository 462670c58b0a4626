"""Models with DTensor parameters: a Llama as 2 replicas x 2 ranks x 2 shards over gloo equals plain autograd.

Run: pytest tests/processes/test_tensor_parallel.py (CPU, one launch of eight processes, see
tests/processes/tensor_parallel_worker.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.test_processes import Results, launch, refusals


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder: Path = tmp_path_factory.mktemp("tensor_parallel")
    return launch(8, "llama", folder, set(range(8)), "tests.processes.tensor_parallel_worker")


def test_losses_and_gradients_equal_plain_autograd(results: Results) -> None:
    for found in results.values():
        assert found["sharded"] == 14, "seven matrices in each of this rank's two layers"
        assert max(found["errors"].values()) < 1e-12
        assert len(found["losses"]) == 20
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-12)
        assert found["losses"][-1] < 0.9 * found["losses"][0]


def test_collectives_are_nodes_of_the_phases(results: Results) -> None:
    """Two sums a layer in F; in B the sums of the gradients that enter attention and MLP."""
    for found in results.values():
        assert found["collectives"] == {"F": 4, "B": 10, "W": 0}


def test_what_runs_in_one_process_is_refused(results: Results) -> None:
    for message in refusals(results, "measure", "ZbfxError"):
        assert "use costs='estimate' or a CostTable" in message
    for message in refusals(results, "check", "ZbfxError"):
        assert "before its parameters are distributed" in message
