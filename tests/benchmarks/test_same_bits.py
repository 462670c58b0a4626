"""The comparison of two checkouts: what counts as equal, and a run of this checkout against itself.

Run: pytest tests/benchmarks/test_same_bits.py (2 processes).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.coverage.same_bits import ROOT, compared, same_bits


def test_bits_count_and_not_values() -> None:
    numbers = torch.tensor([1.0, math.nan, 0.0])
    assert same_bits(numbers, numbers.clone())
    assert not same_bits(numbers, torch.tensor([1.0, math.nan, -0.0]))
    assert not same_bits(numbers, torch.tensor([math.nextafter(1.0, 2.0), math.nan, 0.0], dtype=torch.float64))
    assert not same_bits(numbers, numbers.view(3, 1))
    assert same_bits(torch.tensor(2, dtype=torch.long), torch.tensor(2, dtype=torch.long))
    assert same_bits(numbers.bfloat16(), numbers.bfloat16())


def test_what_one_run_lacks_differs() -> None:
    both = {"loss": torch.ones(()), "gradient": torch.zeros(2)}
    assert compared(both, dict(both)) == {"compared": 2, "equal": True, "differs": []}
    assert compared(both, {"loss": torch.ones(())}) == {"compared": 2, "equal": False, "differs": ["gradient"]}
    assert compared({}, both)["differs"] == ["loss", "gradient"]
    assert compared("it failed", "it failed")["equal"] is False
    assert compared(both, "it failed")["error_after"] == "it failed"


@pytest.mark.processes
@pytest.mark.slow
def test_a_checkout_equals_itself(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "coverage" / "same_bits.py"
    command = [sys.executable, str(script), "--before", str(ROOT), "--only", "dropout", "--schedule", "zb-h1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    row, _, summary = done.stdout.partition("\n")
    found = json.loads(row)
    assert (found["model"], found["schedule"], found["equal"], found["differs"]) == ("dropout", "zb-h1", True, [])
    parameters = 2 * 5
    assert found["compared"] == 2 + 2 * parameters + parameters + 1
    assert json.loads(summary)["quantities"] == found["compared"]
