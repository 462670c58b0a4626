"""Optimizer steps without a barrier over two and four processes and gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.processes import optimizers
from tests.support.pool import Launch


@pytest.fixture(params=[2, 4])
def world(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == expected["losses"]
    assert all(torch.equal(p, expected["parameters"][name]) for name, p in found["parameters"].items())


@pytest.mark.parametrize(("schedule", "max_norm", "clips"), [("zb-h1", 0.1, 8), ("zb-h2", 0.1, 8), ("1f1b", 10.0, 0)])
def test_steps_equal_those_with_a_barrier_in_bits(
    launch: Launch, world: int, schedule: str, max_norm: float, clips: int
) -> None:
    ranks = launch(world, optimizers.with_and_without_barrier, schedule, max_norm)
    for results in ranks.values():
        assert_equal(results[False], results[True])
        assert results[False]["losses"] == ranks[0][False]["losses"]
        assert results[False]["counts"]["clipped"] == results[False]["counts"]["repeated"] == clips
    assert ranks[0][False]["counts"]["rolled_back"] == clips
    assert ranks[world - 1][False]["counts"]["rolled_back"] == 0  # the last rank of the chain knows


def test_skip_connections_and_other_shapes(launch: Launch, world: int) -> None:
    for results in launch(world, optimizers.with_skip_connections).values():
        assert_equal(results[False], results[True])
        assert results[False]["counts"]["repeated"] == 4


def test_tied_weights_equal_those_of_one_process(launch: Launch, world: int) -> None:
    for results in launch(world, optimizers.tied_weights).values():
        assert_equal(results["ranks"], results["local"])
        assert results["ranks"]["counts"]["clipped"] == 4


def test_all_ranks_skip_and_name_stage_and_microbatch(launch: Launch, world: int) -> None:
    ranks = launch(world, optimizers.not_finite)
    for found in ranks.values():
        assert found["cause"] == "skipped: F0.3 (stage 0, microbatch 3)"
        assert found["kept"]
        assert found["later"] == ranks[0]["later"] < 2.0
        assert (found["counts"]["steps"], found["counts"]["skipped"]) == (3, 1)


def test_a_failing_optimizer_is_heard_of_at_once(launch: Launch, world: int) -> None:
    """While its process lives on, with messages under way."""
    heard = launch(world, optimizers.failing)
    assert list(heard.values()) == ["rank 0: InjectedError: on purpose"] * world


def test_replicas_come_to_the_same_verdict(launch: Launch) -> None:
    """Two of two ranks, against one process with the batches of both."""
    ranks = launch(4, optimizers.replicated_ranks)
    for rank, results in ranks.items():
        for max_norm in ("0.1", "10.0"):
            found, alone = results[f"{max_norm} False"], results[f"{max_norm} alone"]
            assert_equal(found, results[f"{max_norm} True"])
            assert_equal(found, ranks[(rank + 2) % 4][f"{max_norm} False"])
            assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
            assert found["norms"] == pytest.approx(alone["norms"][: len(found["norms"])], rel=1e-5)
            assert found["counts"]["repeated"] == (6 if max_norm == "0.1" else 0)
