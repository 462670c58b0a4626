"""Outputs on the rank that makes them or on all, and metrics over replicas: two replicas of two ranks, in float64."""

from __future__ import annotations

from tests.processes import outputs_worker
from tests.processes.outputs_worker import RANKS, REPLICAS
from tests.support.pool import Launch


def test_outputs_and_metrics_over_ranks_and_replicas(launch: Launch) -> None:
    found = launch(REPLICAS * RANKS, outputs_worker.asked)
    for rank, results in found.items():
        assert results["here"] == [["hidden"], ["logits"]][rank % RANKS]
        assert max(results["outputs"]) < 1e-12
        assert max(results["loss"], results["gradient"]) < 1e-12
        assert max(results["evaluated"].values()) < 1e-12
        assert max(results["metrics"].values()) < 1e-12


def test_generate_of_a_bound_model_is_refused(launch: Launch) -> None:
    """Until the step is closed and all values are here."""
    found = launch(REPLICAS * RANKS, outputs_worker.asked)
    for rank, results in found.items():
        others = ["head.weight, head.bias", "first.weight, first.bias"][rank % RANKS]
        for refused in (results["refused"], results["closed"]):
            assert "Generating.generate would run on this rank alone: the model is bound to a pipeline, and" in refused
            assert f"other ranks have values of {others}" in refused
            assert "step.export(folder), on all ranks" in refused
        assert results["generated"]
