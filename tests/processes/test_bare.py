"""Ranks without trainable parameters, or without any: an optimizer, clipping, replicas and ZeRO work on them."""

from __future__ import annotations

import pytest

from tests.processes import bare_worker
from tests.support.pool import Launch

WAYS = [(1, "plain", 0), (1, "validated", 0), (2, "checked", 0), (2, "plain", 1), (2, "validated", 1)]


@pytest.mark.parametrize(("replicas", "optimizer", "zero"), WAYS)
@pytest.mark.parametrize("model", bare_worker.MODELS)
def test_training_equals_plain_pytorch(launch: Launch, model: str, replicas: int, optimizer: str, zero: int) -> None:
    ranks = launch(2 * replicas, bare_worker.trained, model, replicas, optimizer, zero)
    for found in ranks.values():
        assert max(found["losses"], found["norms"], found["parameters"]) < 1e-12
    assert (0 in [found["own"] for found in ranks.values()]) == (model == "bare")
