"""Some cases of the fuzzer of unlike microbatches, in this process."""

from __future__ import annotations

import pytest

from benchmarks.coverage.fuzz_unlike import STEPS, TOLERANCE, Case, outcome_of

SEEDS = (4, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_random_steps_equal_plain_autograd(seed: int) -> None:
    case = Case.of(seed)
    assert len({len(rows) for rows in case.steps()}) > 1
    assert len(list(case.steps())) == STEPS
    outcome = outcome_of(case)
    assert outcome.error < TOLERANCE
    assert outcome.refused < STEPS
    assert (outcome.share > 0) == (case.room is not None)
