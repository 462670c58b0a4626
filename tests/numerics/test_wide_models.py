"""Random models of the kinds that go wrong in silence, beside plain PyTorch.

`benchmarks/coverage/fuzz_wide.py` runs thousands, also over processes.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from benchmarks.coverage import fuzz_wide
from benchmarks.coverage.ambient import MODES
from benchmarks.coverage.random_models import DOUBLE, LAYERS
from benchmarks.coverage.wide_models import CALLS, LOSSES, WRAPPINGS, Recipe, Step, Wide, draw
from benchmarks.coverage.wide_parts import PARTS, REFUSED
from benchmarks.coverage.wide_runs import Found, Outcome, compare, differences

FIRST, COUNT = 3000, 12


def agrees(wide: Wide) -> None:
    outcome = compare(wide)
    assert outcome.wrong is None
    assert outcome.refusal is None or outcome.meant, outcome.refusal


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_some_random_models() -> None:
    for seed in range(FIRST, FIRST + COUNT):
        try:
            agrees(draw(Random(seed)))
        except Exception as error:
            raise AssertionError(f"fuzz_wide.py --count 1 --seed {seed}: {draw(Random(seed))}") from error


def test_every_kind_is_drawn() -> None:
    drawn = [draw(Random(seed)) for seed in range(2000)]
    steps = [step for wide in drawn for step in wide.recipe.steps]
    assert {step.kind for step in steps} >= {*PARTS, *LAYERS}
    assert {step.wrapping for step in steps} == set(WRAPPINGS)
    assert {wide.recipe.loss for wide in drawn} == set(LOSSES)
    assert {wide.recipe.refused for wide in drawn} == {"", *REFUSED}
    assert {wide.recipe.dtype for wide in drawn} == {DOUBLE, torch.float32, torch.bfloat16}
    modes = {(call, mode) for wide in drawn for call, mode in wide.modes.items()}
    assert modes == {(call, mode) for call in CALLS for mode in MODES} - {("compile", "default device")}
    assert {(wide.ranks, wide.per_rank) for wide in drawn} >= {(1, 1), (4, 1), (2, 2)}
    assert {wide.microbatches for wide in drawn} == set(range(1, 7))
    assert len({wide.recipe.dims for wide in drawn}) == 27
    assert {wide.new_shape for wide in drawn} == {"", "recompile", "symbolic"}


def wide_of(*steps: Step, **changes: object) -> Wide:
    recipe = Recipe(steps, None, False, "mean", DOUBLE, (0, 0, 0), "none")
    return replace(Wide(recipe, 1, 1, 2, "gpipe", {}, steps=2), **changes)  # type: ignore[arg-type]


def along(dims: tuple[int, int, int], wide: Wide) -> Wide:
    """The batch lies along these dimensions of the arguments."""
    return replace(wide, recipe=replace(wide.recipe, dims=dims))


FOUND = {
    "a norm's strides that no memory format has": along(
        (1, 0, 2), wide_of(Step("batch norm", (0,)), Step("cross attention", (1, 1)))
    ),
    "a write into what a checkpointed part saved": wide_of(Step("backward saves", (0,), "checkpoint")),
    "a module of the user's that is compiled": wide_of(Step("hook writes", (0,), "torch.compile")),
    "a compiled module with a parametrization": wide_of(Step("weight norm", (0,), "torch.compile")),
    "a draw from a part of a larger value that travels": along(
        (1, 0, 0),
        wide_of(Step("complex filter", (0,), "frozen"), Step("dropped twice", (1,)), ranks=2, cuts=("parts.1",)),
    ),
    "a draw from a gradient of a norm, whose strides are not those of its fake version": wide_of(
        Step("backward draws", (0,)), Step("batch norm", (1,)), ranks=2, microbatches=1
    ),
    "a checkpointed part that writes, traced under a mode that its backward does not have": wide_of(
        Step("counted", (0,), "checkpoint"), modes={"compile": "function mode"}
    ),
}


@pytest.mark.parametrize("kind", FOUND)
def test_what_was_wrong_once(kind: str) -> None:
    agrees(FOUND[kind])


def test_differences_are_seen() -> None:
    one = torch.ones(2, dtype=DOUBLE)

    def found(gradient: torch.Tensor | None, buffer: torch.Tensor = one) -> Found:
        return Found(one.sum(), {"p": gradient}, {"b": buffer})

    assert differences(found(one), found(one), 1e-10, {}) == (0.0, None)
    assert differences(found(one * 2), found(one), 1e-10, {})[1] == "p: relative difference 1 (of 1)"
    assert differences(found(one + 1e-9), found(one), 1e-10, {"p": 1e-9})[1] is None
    assert differences(found(None), found(one), 1e-10, {})[1] == "p: no gradient"
    assert differences(found(one, one * 3), found(one), 1e-10, {})[1] == "b: relative difference 2 (of 1)"
    assert "torch.float32" in str(differences(found(one.float()), found(one), 1e-10, {})[1])
    assert differences(found(one * float("nan")), found(one), 1e-10, {})[1] == "p: relative difference nan (of 1)"


def test_models_that_diverge_are_compared_where_they_are_finite() -> None:
    inf, nan, one = float("inf"), float("nan"), torch.ones((), dtype=DOUBLE)

    def wrong(got: list[float], wanted: list[float], noise: float = 0.0) -> str | None:
        have, want = (Found(one, {"p": torch.tensor(value, dtype=DOUBLE)}, {}) for value in (got, wanted))
        return differences(have, want, 1e-10, {"p": noise})[1]

    assert wrong([nan, inf, 1.0], [nan, inf, 1.0]) is None
    assert wrong([nan, inf, 2.0], [nan, inf, 1.0]) == "p: relative difference 1 (of 1)"
    assert wrong([inf, 1.0], [-inf, 1.0], 1e300) == "p: relative difference inf (of 1)"
    assert wrong([1.0, nan], [nan, 1.0], 1e300) == "p: relative difference nan (of 1)"


def test_a_campaign_that_is_cut_off_tells_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome_of(seed: int) -> Outcome:
        if seed == 2:
            fuzz_wide.end(15, None)
        return Outcome(refusal="no such thing" if seed else None)

    monkeypatch.setattr(fuzz_wide, "outcome_of", outcome_of)
    summary = fuzz_wide.campaign(0, 9)
    assert (summary["done"], summary["equal"], summary["refused_seeds"]) == (2, 1, {"no such thing": [1]})
