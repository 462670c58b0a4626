"""docs/disk.md is true: its blocks run, from an empty folder, with 1 and 2 processes."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support import documents
from tests.support.documents import run

blocks = partial(documents.blocks, "docs/disk.md")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.transformers
def test_blocks_run_in_order_with_any_number_of_processes(tmp_path: Path) -> None:
    """With 2 processes, and with 1, which goes on from three quarters of it: the same losses."""
    make, script, look, _ = blocks("python")
    command, _ = blocks("sh")
    (tmp_path / "train.py").write_text(script)
    run([sys.executable, "-c", make], tmp_path)
    printed = run(shlex.split(command), tmp_path)
    losses = losses_of(printed)
    assert sorted(losses) == [5, 10, 15, 20]
    assert all(len(found) == 1 for found in losses.values()), "the same on both ranks"
    assert int(run([sys.executable, "-c", look], tmp_path)) > 10_000
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-15", "step-20"]
    shutil.rmtree(checkpoints / "step-20")
    assert losses_of(run(shlex.split(command.replace("=2", "=1")), tmp_path)) == {20: losses[20]}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.transformers
def test_trainer_runs_over_processes(tmp_path: Path) -> None:
    make, _, _, script = blocks("python")
    _, command = blocks("sh")
    (tmp_path / "finetune.py").write_text(script)
    run([sys.executable, "-c", make], tmp_path)
    printed = run(shlex.split(command), tmp_path)
    assert len(re.findall(r"'eval_loss': '?5\.", printed)) == 2, printed
    assert sorted(path.name for path in (tmp_path / "tuned").iterdir()) == ["checkpoint-10", "checkpoint-5", "final"]


def losses_of(printed: str) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed):
        found.setdefault(int(step), set()).add(loss)
    return found
