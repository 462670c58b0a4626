"""Where and with what a figure was measured: the fields that every row of a benchmark carries."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import git_commit

PACKAGES = ("torch", "networkx", "numpy", "mip")


def environment() -> dict[str, Any]:
    """The commit, the versions that matter, and the machine. Take it once, before the figures."""
    return {"commit": git_commit(), "versions": versions(), "hardware": hardware()}


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: found for name in PACKAGES if (found := installed(name))}}


def installed(package: str) -> str:
    """Its version; "" if it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def hardware() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "memory_gib": round(memory_bytes / 2**30, 1), "gpus": gpus}


def cpu_name() -> str:
    """The processor as Linux names it, elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row to a file of JSON lines."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
