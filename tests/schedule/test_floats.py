"""Costs of 17 digits, as measured seconds are, prove as integers do."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from zbfx import CostTable, StageCost
from zbfx.schedule import check, plan
from zbfx.timing.exact import on_common_tick

SECONDS = 1.2345678901234567e-6


def tables(seed: int) -> tuple[CostTable, CostTable, int]:
    """Unequal stages in whole numbers, the same in seconds, and a number of microbatches."""
    random = Random(seed)
    p = random.randint(2, 4)
    times = [[random.randint(low, low + 900) for low in (700, 700, 300)] for _ in range(p)]
    whole = CostTable.chain([StageCost(f, b, w, 100, 50) for f, b, w in times], 100)
    exactly = [StageCost(f * SECONDS, b * SECONDS, w * SECONDS, 100, 50) for f, b, w in times]
    seconds = CostTable.chain(exactly, 100 * SECONDS)
    return whole, seconds, random.randint(p, 2 * p)


@pytest.mark.parametrize("seed", range(8))
def test_the_same_plans_and_proofs(seed: int) -> None:
    whole, seconds, m = tables(seed)
    first = plan(whole, m, mem_limit="1x", budget_s=10)
    second = plan(seconds, m, mem_limit="1x", budget_s=10)
    assert (first.gap, second.gap) == (0, 0)
    assert second.iteration_s == pytest.approx(first.iteration_s * SECONDS, rel=1e-9)
    assert second.costs is seconds
    assert check(seconds, m, second.ranks, "1x").iteration_s == second.iteration_s
    assert second.notes[-1].startswith("times are rounded down to a billionth of the longest action")


def test_times_are_rounded_down_where_digits_are_too_many() -> None:
    whole, seconds, _ = tables(0)
    assert on_common_tick(whole) is whole
    coarse = on_common_tick(seconds)
    longest = max(Fraction(str(t)) for s in seconds.stages for t in (s.forward_s + 0.0, s.backward_s or 0.0))
    for exactly, rounded in zip(seconds.stages, coarse.stages, strict=True):
        for name in ("forward_s", "backward_input_s", "backward_weight_s"):
            lost = Fraction(repr(getattr(exactly, name))) - getattr(rounded, name)
            assert 0 <= lost < 4 * longest / 10**9
        assert rounded.backward_s is None
    assert coarse.edges[0].forward_s == coarse.edges[0].backward_s
    fused = CostTable.chain([StageCost(0.1234567890123, 0.2, 0.3, backward_s=0.4123456789012)])
    assert 0.412345678 < float(on_common_tick(fused).stages[0].backward_s or 0) <= 0.4123456789012
