"""Whether two checkouts of this project compute results that are equal in all bits.

    python benchmarks/coverage/same_bits.py --before ../zbfx-before [--only gpt]

Runs the job of `bits_runs.py` (models, schedules, backends, optimizer steps, processes) in a process for each checkout,
and compares losses, gradients, parameters and buffers. Prints a JSON row for each run of a model, then a summary; exits
1 where anything differs or fails. Only zbfx is the checkout's: both run the models and jobs that lie beside this file.
To know what the machine itself repeats, compare a checkout with itself (`--before X --after X`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]

Results = Mapping[str, Tensor] | str  # or the error that ended the run


def started(checkout: Path, folder: Path, chosen: Sequence[str]) -> subprocess.Popen[bytes]:
    """The job under the zbfx of a checkout, which writes its results into the folder."""
    library, results = folder / "library", folder / "results"
    library.mkdir(parents=True)
    results.mkdir()
    (library / "zbfx").symlink_to(checkout.resolve() / "zbfx")
    settings = {
        "PYTHONPATH": os.pathsep.join((str(library), str(ROOT))),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # kernels of another run would be neither's
    }
    command = [sys.executable, "-m", "benchmarks.coverage.bits_runs", str(results), *chosen]
    return subprocess.Popen(command, cwd=library, env=os.environ | settings)


def read(path: Path) -> Results:
    return torch.load(path) if path.exists() else "the process ended before this run"


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in dtype, shape and every bit: nan is equal to itself, 0 is not to -0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (one, other)))


def compared(before: Results, after: Results) -> dict[str, Any]:
    """The fields of a row that say whether two runs are equal."""
    if isinstance(before, str) or isinstance(after, str):
        errors = {"before": before, "after": after}
        failed = {f"error_{name}": found[-2000:] for name, found in errors.items() if isinstance(found, str)}
        return {"compared": 0, "equal": False, "differs": [], **failed}
    names = list(dict.fromkeys((*before, *after)))
    differs = [n for n in names if n not in before or n not in after or not same_bits(before[n], after[n])]
    return {"compared": len(names), "equal": not differs, "differs": differs}


def commit_of(checkout: Path) -> str:
    """The commit that is checked out, marked if files differ from it; "" outside of a repository."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of this project")
    parser.add_argument("--after", type=Path, default=ROOT, help="another one; by default that of this file")
    parser.add_argument("--only", help="the model to run; by default all")
    parser.add_argument("--schedule", help="the schedule, or other run, of `bits_runs.py`; by default all")
    options = parser.parse_args(arguments)
    asked = {"--only": options.only, "--schedule": options.schedule}
    chosen = [word for flag, name in asked.items() if name is not None for word in (flag, name)]
    checkouts, begun = {"before": options.before, "after": options.after}, perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary) / name for name in checkouts}
        jobs = [started(checkout, folders[name], chosen) for name, checkout in checkouts.items()]
        try:
            codes = [job.wait() for job in jobs]
        finally:
            for job in jobs:
                job.terminate()
        results = [folders[name] / "results" for name in checkouts]
        runs = sorted({path.relative_to(folder) for folder in results for path in folder.glob("*/*.pt")})
        rows = []
        for run in runs:
            found = compared(*(read(folder / run) for folder in results))
            rows.append({"model": str(run.parent), "schedule": run.stem, **found})
            print(json.dumps(rows[-1]), flush=True)
    equal = bool(rows) and all(row["equal"] for row in rows) and not any(codes)
    summary = {
        **{name: commit_of(checkout) for name, checkout in checkouts.items()},
        "models": len({row["model"] for row in rows}),
        "runs": len(rows),
        "quantities": sum(row["compared"] for row in rows),
        "differ": sum(len(row["differs"]) for row in rows),
        "failed": sum(not row["compared"] for row in rows),
        "equal": equal,
        "seconds": round(perf_counter() - begun),
        "torch": torch.__version__,
    }
    print(json.dumps(summary, indent=1))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
