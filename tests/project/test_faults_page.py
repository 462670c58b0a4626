"""`docs/faults.md`: the launcher whose processes train on when one is killed, and the fault on purpose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.documents import blocks, run

PAGE = "docs/faults.md"


@pytest.mark.slow
def test_processes_of_the_launcher_train_on(tmp_path: Path) -> None:
    launcher, train, _ = blocks(PAGE, "python")
    loop = "for number in range(20):\n"
    assert loop in train
    kill = "    if (rank, number) == (3, 5): os.kill(os.getpid(), 9)\n"
    (tmp_path / "launch.py").write_text(launcher)
    (tmp_path / "train.py").write_text(train.replace(loop, loop + kill))
    printed = run(["python", "launch.py"], tmp_path)
    losses = re.findall(r"rank \d: loss (\d+\.\d+)", printed)
    assert len(losses) == 3
    assert len(set(losses)) == 1
    assert "processes ended with [0, 0, 0, -9]" in printed


@pytest.mark.slow
def test_a_fault_on_purpose_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    *_, injected = blocks(PAGE, "python")
    exec(compile(injected, PAGE, "exec"), {})
    assert capsys.readouterr().out == "rank 1, step 1, action B1.0 (stage 1, microbatch 0): InjectedError: on purpose\n"
