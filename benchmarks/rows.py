"""One line of the benchmark's output, and what identifies the code and the machine that it was measured with."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Measured, Runnable, single_ms, step_ms
from benchmarks.place import Place
from benchmarks.stages import CONFIGS
from benchmarks.throughput.cases import Case

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Row:
    """One case. Times in milliseconds, memory per rank in GiB, `layers` per stage.

    `step_ms` is what a step takes in a row of steps, as in training: the median on the slowest rank; `slowest_ms` the
    longest of them; `single_ms` what it takes from a moment at which all ranks begin until the last one ends.
    `planned_ms` is the plan's for `step_ms`.
    """

    system: str
    config: str
    b: int
    m: int
    schedule: str
    backend: str
    split: str
    p: int
    layers: list[int] | None = None
    step_ms: float | None = None
    slowest_ms: float | None = None
    single_ms: float | None = None
    tokens_per_s: float | None = None
    peak_gib: list[float | None] | None = None
    loss: float | None = None
    planned_ms: float | None = None
    planned_gib: list[float] | None = None
    build_s: float | None = None
    error: str | None = None
    commit: str = ""
    device: str = ""
    dtype: str = ""
    torch: str = ""
    nccl: str | None = None

    @property
    def name(self) -> str:
        return f"{self.schedule} {self.backend} {self.split}"


def machine(place: Place, commit: str | None) -> dict[str, Any]:
    """The fields of a row that are the same in all of a run."""
    on_gpu = place.device.type == "cuda"
    return {
        "commit": commit or git_commit(),
        "device": torch.cuda.get_device_name(place.device) if on_gpu else "CPU",
        "dtype": str(place.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
    }


def git_commit() -> str:
    """The commit that is checked out, marked if files differ from it; "" outside of a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def results(case: Case, runnable: Runnable, everyone: Sequence[Measured]) -> dict[str, Any]:
    """The measured fields of a row."""
    median_ms, slowest_ms = step_ms(everyone)
    tokens = case.m * case.b * CONFIGS[case.config].sequence
    return {
        "layers": runnable.layers,
        "step_ms": median_ms,
        "slowest_ms": slowest_ms,
        "single_ms": single_ms(everyone),
        "tokens_per_s": tokens / median_ms * 1e3,
        "peak_gib": [measured.peak_gib for measured in everyone],
        "loss": next((measured.loss for measured in everyone if measured.loss is not None), None),
        "planned_ms": runnable.planned_ms,
        "planned_gib": runnable.planned_gib,
    }
