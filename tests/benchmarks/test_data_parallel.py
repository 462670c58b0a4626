"""The benchmark of replicas, on a tiny model over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpt import GPT, next_token_loss
from benchmarks.stages import CONFIGS, batch, fill
from benchmarks.throughput.data_parallel import expand, parser
from tests.support.pool import Launch
from tests.support.scripts import run_on_ranks

ROOT = Path(__file__).parents[2]
FLAGS = ["--config", "tiny", "--b", "1", "--m", "3", "--device", "cpu", "--backends", "eager"]
FLAGS += ["--costs", "estimate", "--repeats", "2"]


def reference_loss(rows: int) -> float:
    """The mean loss of the batches of all replicas, in one process."""
    model = GPT(CONFIGS["tiny"])
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    ids, targets = batch(CONFIGS["tiny"], rows, torch.device("cpu"))
    return next_token_loss(model(ids), targets).item()


@pytest.mark.slow
def test_two_by_two_has_a_row_for_every_system(launch: Launch, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    script = ROOT / "benchmarks" / "throughput" / "data_parallel.py"
    run_on_ranks(launch, 4, script, ["--ranks", "2", *FLAGS, "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["system"], row["sums"], row["error"]) for row in rows] == [
        (system, sums, None)
        for system, all_sums in (("zbfx", ("alone", "whole", "clustered")), ("torch", ("alone", "ddp", "fsdp2")))
        for sums in all_sums
    ]
    for row in rows:
        assert (row["replicas"], row["ranks"]) == (2, 2)
        assert row["loss"] == pytest.approx(reference_loss(6), rel=1e-5), row
        assert (row["exposed_ms"] is None) == (row["sums"] == "alone")
    _, whole, clustered = rows[:3]
    assert whole["trailing"] == [0, 0]
    assert 0 < clustered["planned_exposed_ms"] <= whole["planned_exposed_ms"]
    assert clustered["sums_mib"] == whole["sums_mib"]


def test_cases_are_listed_by_name() -> None:
    cases = expand(parser().parse_args(["--ranks", "1", "--systems", "torch"]), 2)
    assert [case.name for case in cases] == [
        f"torch 350M 2 x 1 b=2 m=8 - eager {sums}" for sums in ("alone", "ddp", "fsdp2")
    ]
