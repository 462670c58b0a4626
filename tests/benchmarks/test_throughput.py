"""The throughput benchmark, on a tiny model over gloo."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpt import GPT, next_token_loss
from benchmarks.place import placement
from benchmarks.rows import Row
from benchmarks.stages import CONFIGS, LayerCosts, batch, fill, layers_per_stage, pieces
from benchmarks.throughput.cases import ZbfxSchedule, expand
from benchmarks.throughput.compare import parser
from benchmarks.throughput.table import page
from tests.support.pool import Launch
from tests.support.scripts import run_on_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "throughput" / "compare.py"
FLAGS = ["--config", "tiny", "--b", "2", "--device", "cpu", "--head-layers", "2", "--warmup", "1", "--repeats", "2"]

# A schedule that waits forever on one of two ranks: what a hang of the communication library looks like.
HANG = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.throughput import compare

def hanging(case, place):
    if case.schedule == "1F1B":
        time.sleep(1000 * place.rank)
        raise RuntimeError("rank 0 gave up")
    return original(case, place)

original, compare.peer = compare.peer, hanging
compare.FAILURE_GRACE_S = 1.0
compare.main()
"""


def run(script: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    """The rows of a benchmark over two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command += ["--", str(script), *FLAGS, "--out", str(out), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return rows_in(out)


def rows_in(out: Path) -> list[dict[str, Any]]:
    assert not out.with_suffix(".jsonl.journal").exists()
    return [json.loads(line) for line in out.read_text().splitlines()]


def reference_loss(b: int, m: int) -> float:
    """The mean loss of the whole batch, in one process."""
    torch.manual_seed(0)
    model = GPT(CONFIGS["tiny"])
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    ids, targets = batch(CONFIGS["tiny"], m * b, torch.device("cpu"))
    with torch.no_grad():
        return float(next_token_loss(model(ids), targets))


@pytest.mark.slow
def test_every_system_gives_a_row_and_the_same_loss(launch: Launch, tmp_path: Path) -> None:
    schedules = ["GPipe", "1F1B", "ZB1P", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
    flags = ["--microbatches", "4", "--costs", "estimate", "--torch-backends", "eager", "--limit-backends", "eager"]
    flags += ["--zbfx-schedules", "1f1b,nonsense,zb-h1", "--zbfx-splits", "bal,auto", "--splits", "bal"]
    out = tmp_path / "rows.jsonl"
    run_on_ranks(launch, 2, SCRIPT, [*FLAGS, "--out", str(out), *flags])
    rows = rows_in(out)
    assert [(r["system"], r["schedule"], r["split"]) for r in rows] == [
        ("limit", "bubble-free", "bal"),
        *(("zbfx", schedule, split) for schedule in ("1f1b", "nonsense", "zb-h1") for split in ("bal", "auto")),
        *(("torch", schedule, "bal") for schedule in schedules),
    ]
    failed = [r for r in rows if r["error"]]
    assert [r["schedule"] for r in failed] == ["nonsense", "nonsense"]
    assert all("nonsense" in r["error"] and r["step_ms"] is None for r in failed)
    for row in rows:
        assert (row["p"], row["b"], row["m"], row["device"], row["dtype"]) == (2, 2, 4, "CPU", "float32")
        assert row["torch"] == torch.__version__
        if not row["error"]:
            assert row["tokens_per_s"] == pytest.approx(4 * 2 * 16 / row["step_ms"] * 1e3)
            assert sum(row["layers"]) == 5
            assert 0 < row["step_ms"] <= row["slowest_ms"]
            assert len(row["peak_gib"]) == 2
    measured = [r for r in rows if r["system"] != "limit" and not r["error"]]
    assert [r["loss"] for r in measured] == pytest.approx([reference_loss(b=2, m=4)] * len(measured), rel=1e-6)
    assert all(r["planned_ms"] > 0 and len(r["planned_gib"]) == 2 for r in measured if r["system"] == "zbfx")
    assert {tuple(r["layers"]) for r in measured if r["split"] == "bal" and len(r["layers"]) == 2} == {(4, 1)}
    assert "- m=4: zbfx" in page([Row(**r) for r in rows])


@pytest.mark.processes
@pytest.mark.slow
def test_a_hang_is_recorded_and_the_next_case_runs(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    flags = ["--microbatches", "2", "--systems", "torch", "--torch-backends", "eager", "--splits", "even"]
    rows = run(script, tmp_path / "rows.jsonl", *flags, "--torch-schedules", "GPipe,1F1B,ZB1P")
    assert [r["schedule"] for r in rows] == ["GPipe", "1F1B", "ZB1P"]
    assert rows[1]["error"] == "rank 0: RuntimeError: rank 0 gave up"
    assert rows[0]["loss"] == rows[2]["loss"] == pytest.approx(reference_loss(b=2, m=2), rel=1e-6)


def test_blocks_go_where_the_load_is_least() -> None:
    def split(layers: int, stages_per_rank: int, style: str, embedding: float, head: float) -> list[int]:
        return layers_per_stage(layers, placement(2, stages_per_rank, style), LayerCosts(embedding, head))

    assert split(22, 1, "loop", 0.0, 2.0) == [12, 10]
    assert split(24, 1, "loop", 0.5, 3.75) == [14, 10]
    assert split(24, 1, "loop", 0.0, 0.0) == [12, 12]
    assert split(22, 2, "v", 0.0, 2.0) == [6, 6, 6, 4]
    assert split(22, 2, "loop", 0.0, 2.0) == [6, 6, 6, 4]
    assert split(3, 2, "v", 0.0, 9.0) == [0, 2, 1, 0]


def test_pieces_cover_the_model_and_name_their_cuts() -> None:
    cut = pieces([3, 0, 2, 0])
    assert [(piece.start, piece.end) for piece in cut] == [(0, 3), (3, 3), (3, 5), (5, 5)]
    assert [piece.first_module for piece in (cut[0], cut[2], cut[3])] == ["tokens", "blocks.3", "norm"]


def choices(*flags: str) -> argparse.Namespace:
    return parser().parse_args(flags)


def test_cases_come_in_the_order_asked_for() -> None:
    flags = ["--systems", "torch,zbfx", "--microbatches", "8,12", "--splits", "even", "--torch-schedules", "1F1B,ZB1P"]
    assert [case.name for case in expand(choices(*flags, "--first", "zbfx.*m=12", "--first", "zbfx"))] == [
        "zbfx 350M b=2 m=12 zb-1p eager auto",
        "zbfx 350M b=2 m=8 zb-1p eager auto",
        "torch 350M b=2 m=8 1F1B eager even",
        "torch 350M b=2 m=12 1F1B eager even",
        "torch 350M b=2 m=8 1F1B inductor even",
        "torch 350M b=2 m=12 1F1B inductor even",
        "torch 350M b=2 m=8 ZB1P eager even",
        "torch 350M b=2 m=12 ZB1P eager even",
    ]
    only = expand(choices(*flags, "--only", "ZB1P"))
    assert [(case.schedule, case.m) for case in only] == [("ZB1P", 8), ("ZB1P", 12)]


def test_a_zbfx_schedule_reads_limit_and_stages() -> None:
    assert ZbfxSchedule.parse("zb-1p") == ZbfxSchedule("zb-1p", None, None, None, None)
    assert ZbfxSchedule.parse("auto@1.5x*2") == ZbfxSchedule("auto", "1.5x", 2, None, None)
    assert ZbfxSchedule.parse("zb-2p-/group") == ZbfxSchedule("zb-2p", None, None, None, False, "group")
    assert ZbfxSchedule.parse("zb-2p@24GiB-") == ZbfxSchedule("zb-2p", "24GiB", None, None, False)
    with pytest.raises(ValueError, match="reads name"):
        ZbfxSchedule.parse("*2")


def row(system: str, backend: str, step_ms: float | None, **fields: Any) -> Row:
    return Row(system, "350M", 2, 8, fields.pop("schedule", "1f1b"), backend, "bal", 2, step_ms=step_ms, **fields)


def test_the_page_compares_with_the_fastest_of_torch_and_the_limit_of_the_same_kernels() -> None:
    text = page(
        [
            row("torch", "eager", 100.0, schedule="GPipe"),
            row("torch", "inductor", 90.0),
            row("torch", "eager", None, schedule="ZB1P", error="rank 1: OutOfMemoryError: no"),
            row("limit", "eager", 40.0),
            row("limit", "eager", 36.0),
            row("limit", "inductor", 20.0),
            row(
                "zbfx",
                "cudagraph",
                45.0,
                single_ms=46.0,
                planned_ms=44.0,
                peak_gib=[1.5, 2.25],
                layers=[14, 10],
                loss=1.0,
            ),
            row("zbfx", "cudagraph+inductor", 50.0),
        ]
    )
    assert (
        "- m=8: zbfx 1f1b cudagraph bal 45.0 ms, 2.00x the fastest torch schedule (1f1b inductor bal, 90.0 ms), "
        "0.800 of the limit." in text
    )
    zbfx_line = (
        "| 8 | zbfx | 1f1b | cudagraph | bal | 14+10 | 45.0 | 46.0 |  | 1.50 / 2.25 | 44.0 (+2.3%) |  | 1.0000 |"
    )
    assert f"{zbfx_line} 2.00 | 0.800 |" in text
    assert "| 1.80 | 0.400 |" in text
    assert "- torch m=8 ZB1P eager bal: rank 1: OutOfMemoryError: no" in text
