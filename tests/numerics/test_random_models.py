"""Random models under random cuts, placements and schedules: gradients are those of plain autograd.

`benchmarks/coverage/fuzz_models.py` runs thousands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch

from benchmarks.coverage.fuzz_models import LINEAR, LOOPED, SHAPES, V_SHAPED, Fuzzed, Results, differences, draw, run
from benchmarks.coverage.random_models import BINARY, LAYERS, SPECIAL, UNARY, WEIGHTED
from tests.support.reference import one_trace

TIMES = 2  # how many of the graphs have each kind
DRAWS = 300


def kinds_of(shape: str, fuzzed: Fuzzed) -> Iterator[Hashable]:
    """What may go wrong in a graph: steps of its model, and how it is cut, placed and ordered."""
    yield from {step.kind for step in fuzzed.recipe.steps}
    yield from {(shape, schedule) for schedule in fuzzed.schedules}
    yield shape, bool(fuzzed.cuts)
    yield "tied and frozen", bool(fuzzed.recipe.tied), bool(fuzzed.recipe.frozen)
    yield "loss of its own", fuzzed.recipe.own_loss


@cache
def graphs() -> dict[tuple[str, int], Fuzzed]:
    """Of all draws, by shape and seed, those that have a kind of which the ones before are less than `TIMES`."""
    found, count = {}, Counter[Hashable]()
    for seed in range(DRAWS):
        shape = SHAPES[seed % len(SHAPES)]
        fuzzed = draw(Random(seed), shape)
        kinds = set(kinds_of(shape, fuzzed))
        if any(count[kind] < TIMES for kind in kinds):
            found[shape, seed] = fuzzed
            count.update(kinds)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_autograd(shape: str) -> None:
    """Every gradient, the loss and every buffer, within 1e-10 (1e-5 where a part computes in float32), but for what
    rounding makes of gradients that are zero; a parameter without gradient has none."""
    trained = 0
    for (of, seed), fuzzed in graphs().items():
        if of == shape:
            with one_trace():  # where the cuts that were drawn are refused, the model is compiled again
                outcome = run(fuzzed)
            if outcome is not None:  # else no parameter reaches the loss
                assert (outcome.refusal, outcome.wrong) == (None, None), f"draw(Random({seed}), {shape!r}): {fuzzed}"
                trained += 1
    assert trained >= 15


def test_there_are_graphs_of_every_kind() -> None:
    count = Counter(kind for (shape, _), fuzzed in graphs().items() for kind in set(kinds_of(shape, fuzzed)))
    wanted: set[Hashable] = {*LAYERS, *UNARY, *BINARY, *WEIGHTED, *SPECIAL}
    for shape, schedules in zip(SHAPES, (LINEAR, LOOPED, V_SHAPED), strict=True):
        wanted |= {(shape, schedule) for schedule in schedules} | {(shape, True), (shape, False)}
    wanted |= {("tied and frozen", tied, frozen) for tied in (True, False) for frozen in (True, False)}
    wanted |= {("loss of its own", True), ("loss of its own", False)}
    assert set(count) == wanted
    assert min(count.values()) >= TIMES


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
