"""The benchmark of the planner beside published heuristics prints rows that add up."""

from __future__ import annotations

import pytest

from benchmarks.planner.frontier import QUESTIONS


@pytest.mark.slow
@pytest.mark.parametrize("question", sorted(QUESTIONS))
def test_rows_of_every_question(question: str) -> None:
    first, *_ = QUESTIONS[question](3, 1, 0.2)
    assert not first["worse"]
    assert first["iteration"] >= first["lower_bound"] > 0
    assert first["m"] >= first["p"] >= 3
