"""docs/disk.md is true: its blocks run, from an empty folder, its scripts with 1 and 2 processes."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.support import documents
from tests.support.pool import Launch
from tests.support.scripts import run_on_ranks

blocks = partial(documents.blocks, "docs/disk.md")
pytestmark = [pytest.mark.slow, pytest.mark.transformers]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The blocks' own, with the model that the first of them makes."""
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[0], {})
    return tmp_path


def launched(launch: Launch, script: str, ranks: int, folder: Path) -> str:
    """What all ranks of a page's script print."""
    at, command = {"train.py": (1, 0), "finetune.py": (3, 1)}[script]
    (folder / script).write_text(blocks("python")[at])
    assert re.match(rf"torchrun --nproc-per-node=2 {script}\b", blocks("sh")[command])
    return "".join(printed.out for printed in run_on_ranks(launch, ranks, script, folder=folder).values())


def test_blocks_run_in_order_with_any_number_of_processes(
    launch: Launch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 2 processes, and with 1, which goes on from three quarters of it: the same losses."""
    losses = losses_of(launched(launch, "train.py", 2, folder))
    assert sorted(losses) == [5, 10, 15, 20]
    assert all(len(found) == 1 for found in losses.values()), "the same on both ranks"
    capsys.readouterr()
    exec(blocks("python")[2], {})
    assert int(capsys.readouterr().out) > 10_000
    checkpoints = folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-15", "step-20"]
    shutil.rmtree(checkpoints / "step-20")
    assert losses_of(launched(launch, "train.py", 1, folder)) == {20: losses[20]}


def test_trainer_runs_over_processes(launch: Launch, folder: Path) -> None:
    printed = launched(launch, "finetune.py", 2, folder)
    assert len(re.findall(r"'eval_loss': '?5\.", printed)) == 2, printed
    assert sorted(path.name for path in (folder / "tuned").iterdir()) == ["checkpoint-10", "checkpoint-5", "final"]


def losses_of(printed: str) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed):
        found.setdefault(int(step), set()).add(loss)
    return found
