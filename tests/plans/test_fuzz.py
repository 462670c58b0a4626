"""Mutated files and command lines end in a clear error or in a right result: `benchmarks/proofs/fuzz_files.py`."""

from __future__ import annotations

import pytest

from benchmarks.proofs import fuzz_files


@pytest.mark.slow
def test_mutated_files_are_refused_or_right(capsys: pytest.CaptureFixture[str]) -> None:
    count = 15 * len(fuzz_files.KINDS)
    assert fuzz_files.main(["--count", str(count), "--seed", "3"]) == 0
    assert f"{count} cases, seed 3" in capsys.readouterr().out
