"""The benchmark of optimizer steps, on a tiny model over gloo, with two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.pool import Launch
from tests.support.scripts import run_on_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_mode_gives_a_row(launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ["--device", "cpu", "--out", str(out), "--config", "tiny", "--b", "1", "--m", "3", "--costs", "estimate"]
    flags += ["--schedules", "zb-h2,nonsense", "--modes", "barrier,validated,repeat@2"]
    flags += ["--warmup", "1", "--repeats", "4", "--rounds", "1"]
    run_on_ranks(launch, 2, ROOT / "benchmarks" / "throughput" / "optimizer_step.py", flags)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["mode"] for row in rows] == ["barrier", "validated", "repeat@2", "compile"]
    assert "nonsense" in rows[-1]["error"]
    barrier, validated, repeat, _ = rows
    assert barrier["loss"] == validated["loss"]
    assert [row["counts"]["repeated"] for row in (barrier, validated, repeat)] == [0, 0, 2]
    assert repeat["counts"]["rolled_back"] == repeat["counts"]["clipped"] == 2
    assert 0 < validated["planned_ms"] < repeat["planned_ms"]
    assert validated["planned_ms"] <= barrier["planned_ms"]
    assert validated["undo_gib"] == repeat["undo_gib"] != [0.0, 0.0]
    for row in rows[:3]:
        assert (row["p"], row["m"], row["device"], row["torch"]) == (2, 3, "CPU", torch.__version__)
        assert row["tokens_per_s"] == pytest.approx(3 * 16 / row["step_ms"] * 1e3)
        assert row["error"] is None
