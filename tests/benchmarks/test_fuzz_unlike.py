"""Some cases of the fuzzer of unlike microbatches, in this process."""

from __future__ import annotations

import pytest

from benchmarks.coverage.fuzz_unlike import STEPS, TOLERANCE, Case, largest_error

SEEDS = (4, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps_equal_plain_autograd(seed: int) -> None:
    case = Case.of(seed)
    assert len({len(rows) for rows in case.steps()}) > 1
    assert len(list(case.steps())) == STEPS
    assert largest_error(case) < TOLERANCE
