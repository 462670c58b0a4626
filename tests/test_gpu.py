"""Pipelines over NCCL: schedules and backends agree, in bits where nothing is compiled; 200 steps; one GPU.

Run: pytest -m gpu tests/test_gpu.py (skipped without CUDA; two GPUs, or one for the last test).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
LIMIT_S = 280

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def launch(world: int, scenario: str, folder: Path) -> list[Any]:
    """Every rank's result."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [*torchrun, "tests/gpu_worker.py", scenario, str(folder)],
        cwd=ROOT,
        env=environment,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@two_gpus
def test_schedules_and_backends_agree(tmp_path: Path) -> None:
    """Whatever rank holds a parameter under a placement, its gradient is the one of eager 1F1B."""
    ranks = launch(2, "equal", tmp_path)
    expected = {name: value for rank in ranks for name, value in rank["1f1b eager"].items()}
    for case in ranks[0]:
        found = {name: value for rank in ranks for name, value in rank[case].items()}
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if "inductor" in case:
                assert error(value, expected[name]) < 2e-2, (case, name)
            else:
                assert torch.equal(value, expected[name]), (case, name, error(value, expected[name]))


@two_gpus
def test_two_hundred_steps_of_each_backend(tmp_path: Path) -> None:
    for rank in launch(2, "steady", tmp_path):
        for backend, found in rank.items():
            assert found["allocated"][0] == found["allocated"][1], backend
            assert found["reserved"][0] == found["reserved"][1], backend
            assert found["slow"] == 0, (backend, found)


@two_gpus
def test_optimizer_steps_without_a_barrier(tmp_path: Path) -> None:
    """Equal in bits to those with one, on every backend, decided by the process and by the device."""
    for rank in launch(2, "optimizer", tmp_path):
        for case, found in rank.items():
            setting, _, sync = case.rpartition(" ")
            if sync == "True":
                continue
            expected = rank[f"{setting} True"]
            assert torch.equal(found["losses"], expected["losses"]), case
            for name, value in found["parameters"].items():
                assert torch.equal(value, expected["parameters"][name]), (case, name)
            assert found["counts"]["skipped"] == 1, case
            assert found["counts"]["clipped"] == expected["counts"]["clipped"], case
            assert found["counts"]["repeated"] >= expected["counts"]["clipped"], case


def test_one_gpu(tmp_path: Path) -> None:
    (rank,) = launch(1, "alone", tmp_path)
    for case, values in rank.items():
        for name, value in values.items():
            assert error(value, rank["plain"][name]) < 2e-2, (case, name)
            if "inductor" not in case and case != "plain":
                assert torch.equal(value, rank["1f1b eager"][name]), (case, name)
