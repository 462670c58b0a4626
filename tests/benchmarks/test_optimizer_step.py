"""The benchmark of optimizer steps, on a tiny model over gloo, with two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
@pytest.mark.slow
def test_every_mode_gives_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--"]
    command += [str(ROOT / "benchmarks" / "throughput" / "optimizer_step.py"), "--device", "cpu", "--out", str(out)]
    command += ["--config", "tiny", "--b", "1", "--m", "3", "--costs", "estimate", "--schedules", "zb-h2,nonsense"]
    command += ["--warmup", "1", "--repeats", "4", "--rounds", "1", "--modes", "barrier,validated,repeat@2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
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
