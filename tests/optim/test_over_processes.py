"""Optimizer steps without a barrier over processes and gloo. Run: pytest tests/optim/test_over_processes.py (CPU; one
launch of two processes and one of four, see tests/support/optimizers.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.test_processes import Results, launch


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(request.param, "optimizer", tmp_path_factory.mktemp("optimizer"), set(range(request.param)))


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert all(torch.equal(p, expected["parameters"][name]) for name, p in found["parameters"].items())


@pytest.mark.parametrize("case", ["clips", "h2", "free"])
def test_steps_equal_those_with_a_barrier_in_bits(ranks: Results, case: str) -> None:
    for results in ranks.values():
        assert_equal(results[f"{case} False"], results[f"{case} True"])
        assert results[f"{case} False"]["losses"] == ranks[0][f"{case} False"]["losses"]
        clips = 0 if case == "free" else 8
        assert results[f"{case} False"]["counts"]["clipped"] == results[f"{case} False"]["counts"]["repeated"] == clips
    assert ranks[0][f"{case} False"]["counts"]["rolled_back"] == clips
    assert ranks[len(ranks) - 1][f"{case} False"]["counts"]["rolled_back"] == 0  # the last rank of the chain knows


def test_skip_connections_and_other_shapes(ranks: Results) -> None:
    for results in ranks.values():
        assert_equal(results["skips False"], results["skips True"])
        assert results["skips False"]["counts"]["repeated"] == 4


def test_tied_weights_equal_those_of_one_process(ranks: Results) -> None:
    for results in ranks.values():
        assert_equal(results["tied"], results["tied local"])
        assert results["tied"]["counts"]["clipped"] == 4


def test_all_ranks_skip_and_name_stage_and_microbatch(ranks: Results) -> None:
    for results in ranks.values():
        found = results["nan"]
        assert found["cause"] == "skipped: F0.3 (stage 0, microbatch 3)"
        assert found["kept"]
        assert found["later"] == ranks[0]["nan"]["later"] < 2.0
        assert (found["counts"]["steps"], found["counts"]["skipped"]) == (3, 1)


def test_a_failing_optimizer_is_heard_of_at_once(ranks: Results) -> None:
    """While its process lives on, with messages under way."""
    assert [results["fault"] for results in ranks.values()] == ["rank 0: ArithmeticError: on purpose"] * len(ranks)


def test_replicas_come_to_the_same_verdict(tmp_path: Path) -> None:
    """Two of two ranks, against one process with the batches of both."""
    ranks = launch(4, "optimizer-replicas", tmp_path, {0, 1, 2, 3})
    for rank, results in ranks.items():
        for max_norm in ("0.1", "10.0"):
            found, alone = results[f"{max_norm} False"], results[f"{max_norm} alone"]
            assert_equal(found, results[f"{max_norm} True"])
            assert_equal(found, ranks[(rank + 2) % 4][f"{max_norm} False"])
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
            assert found["norms"] == pytest.approx(alone["norms"][: len(found["norms"])], rel=1e-5)
            assert found["counts"]["repeated"] == (6 if max_norm == "0.1" else 0)
