"""The benchmark of compile times reports every step of `zbfx.compile`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compiling.compile_time import CASES, LLAMAS, STEPS, Case, compile_case, table
from benchmarks.gpt import CONFIGS
from benchmarks.report import append_row, environment


@pytest.mark.slow
def test_row_has_all_steps_and_says_where_it_was_measured(tmp_path: Path) -> None:
    row = compile_case(Case("350M", 2, 1, 2), "zb-h1", share_layers=True) | environment()
    assert list(row["seconds"]) == list(STEPS)
    assert row["seconds"]["trace"] > 0
    assert sum(row["seconds"].values()) <= row["total_s"] + 0.001 * len(STEPS)
    assert row["peak_gib"] >= row["import_gib"] > 0
    hidden, layers = 1024, 24
    block = 12 * hidden * hidden + 13 * hidden
    assert row["parameters"] == layers * block + 2 * hidden + (2 * 50304 + 1024) * hidden
    assert set(row["versions"]) >= {"python", "torch"}
    assert set(row["hardware"]) == {"cpu", "cores", "memory_gib", "gpus"}
    append_row(tmp_path / "rows", row)
    assert json.loads((tmp_path / "rows").read_text()) == row
    assert table([row]).row_count == 1


def test_cases_are_the_models_of_the_paper() -> None:
    paper = [config for config in CASES if config in CONFIGS]
    assert [(c, CASES[c].stages, CASES[c].microbatch_size, CASES[c].microbatches) for c in paper] == [
        ("1.5B", 8, 6, 24),
        ("6.2B", 8, 3, 24),
        ("14.6B", 16, 1, 48),
        ("28.3B", 32, 1, 96),
    ]
    assert {*CASES} == {*paper, *LLAMAS}
