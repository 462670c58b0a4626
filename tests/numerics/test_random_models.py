"""Random models under random cuts, placements and schedules: gradients are those of plain autograd.

`benchmarks/coverage/fuzz_models.py` runs thousands.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from benchmarks.coverage.fuzz_models import SHAPES, Results, differences, draw, run
from benchmarks.coverage.random_models import BINARY, LAYERS, SPECIAL, UNARY, WEIGHTED
from tests.support.reference import one_trace

GRAPHS = {"linear": 180, "looped": 70, "v": 70}


def agrees(random: Random, shape: str) -> None:
    fuzzed = draw(random, shape)
    note(str(fuzzed))
    with one_trace():  # where the cuts that were drawn are refused, the model is compiled again
        outcome = run(fuzzed)
    assume(outcome is not None)
    assert outcome is not None
    assert outcome.refusal is None
    assert outcome.wrong is None


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_autograd(shape: str) -> None:
    """Every gradient, the loss and every buffer, within 1e-10 (1e-5 where a part computes in float32), but for what
    rounding makes of gradients that are zero; a parameter without gradient has none."""

    @settings(
        max_examples=GRAPHS[shape],
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(random=st.randoms(use_true_random=False))
    def every_graph(random: Random) -> None:
        agrees(random, shape)

    every_graph()


def test_there_are_enough_graphs_of_every_kind() -> None:
    assert sum(GRAPHS.values()) >= 300
    drawn = [draw(Random(seed)) for seed in range(300)]
    kinds = {step.kind for fuzzed in drawn for step in fuzzed.recipe.steps}
    assert kinds == {*LAYERS, *UNARY, *BINARY, *WEIGHTED, *SPECIAL}
    assert {schedule for fuzzed in drawn for schedule in fuzzed.schedules} >= {
        "gpipe",
        "1f1b",
        "zb-h1",
        "zb-2p",
        "zb-v",
    }
    assert any(fuzzed.cuts for fuzzed in drawn)
    assert any(fuzzed.recipe.tied and fuzzed.recipe.frozen for fuzzed in drawn)


def result(*gradients: torch.Tensor | None) -> Results:
    named = {f"p{k}": gradient for k, gradient in enumerate(gradients)}
    return Results(torch.tensor(1.0, dtype=torch.float64), named, {}, tuple(named))


def test_noise_excuses_what_is_no_larger() -> None:
    zero, other = torch.full((2,), 1e-14, dtype=torch.float64), torch.full((2,), 4e-14, dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    assert differences(result(one, other), result(one, zero))[1] is not None
    assert differences(result(one, other), result(one, zero), noise={"p1": 1e-14})[1] is None
    assert differences(result(one, other), result(one, zero), noise={"p1": 1e-15})[1] is not None
    assert differences(result(2 * one, other), result(one, zero), noise={"p1": 1e-14})[1] is not None
    assert differences(result(one, one + 1e-9), result(one, one), noise={"p1": 1e-9})[1] is not None  # it is not zero


def test_differences_are_seen() -> None:
    one, two = torch.ones(2, dtype=torch.float64), torch.full((2,), 2.0, dtype=torch.float64)
    assert differences(result(one, None), result(one, None)) == (0.0, None)
    assert differences(result(two), result(one))[1] == "p0: relative difference 1"
    assert differences(result(one * float("nan")), result(one))[1] == "p0: relative difference nan"
    assert differences(result(one, one), result(one, None))[1] == "p1: a gradient where there is none"
    assert differences(result(None, one), result(one, one))[1] == "p0: no gradient"
    twice = replace(result(one, one), listed=("p0", "p0", "p1"))
    assert "the step's parameters are ('p0', 'p0', 'p1')" in str(differences(twice, result(one, one))[1])
