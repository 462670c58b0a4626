"""examples/finetune.py goes on, with the losses of a run that nothing broke, where a process is killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from examples.finetune import Text, parse
from tests.checkpoint.models import VOCABULARY, tied_llama
from tests.support.pool import Launch
from tests.support.scripts import run_on_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "finetune.py"
STEPS, KILLED_AT, LIMIT_S = 16, 7, 200
OPTIONS = [
    *("--steps", str(STEPS), "--microbatches", "3", "--length", "12", "--learning-rate", "1e-2"),
    *("--save-every", "3", "--evaluate-every", "8"),
]


def arguments(folder: Path) -> list[str]:
    return [*map(str, (folder / "base", folder / "text.npy", folder / "out")), *OPTIONS]


def start(processes: int, folder: Path) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--max-restarts=3"]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), *arguments(folder)],
        env=os.environ | settings,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(run: subprocess.Popen[str]) -> str:
    """What it wrote to stderr; nothing of it is left."""
    try:
        _, written = run.communicate(timeout=LIMIT_S)
        assert run.returncode == 0, written
        return written
    finally:
        for pid in [*children(run), run.pid] if run.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        run.wait()


def children(run: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]


def told(folder: Path) -> list[tuple[int, str, float]]:
    """(step, what, value), in the order in which they were written."""
    file = folder / "out" / "losses.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(line.pop("step"), *line.popitem()) for line in lines]


def expected(folder: Path) -> dict[tuple[int, str], float]:
    """In plain transformers, in one process."""
    options = parse(arguments(folder))
    text, found = Text.read(options), dict[tuple[int, str], float]()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    for step in range(STEPS):
        loss = model(**text.batch(step, options.microbatches)).loss  # of microbatches with equally many tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found[step + 1, "loss"] = loss.item()
        if (step + 1) % options.evaluate_every == 0:
            with torch.no_grad():
                losses = [model(**batch).loss.item() for batch in text.evaluation(options.microbatches)]
            found[step + 1, "held_out"] = sum(losses) / len(losses)
    return found


@pytest.mark.timeout(500)
@pytest.mark.slow
@pytest.mark.transformers
def test_training_survives_a_killed_process_and_another_number_of_them(launch: Launch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tied_llama().save_pretrained(tmp_path / "base")
    np.save(tmp_path / "text.npy", torch.randint(VOCABULARY, (2000,)).numpy())
    wanted = expected(tmp_path)
    run = start(2, tmp_path)
    begun = time.monotonic()
    while not any(step >= KILLED_AT for step, *_ in told(tmp_path)):
        assert run.poll() is None
        assert time.monotonic() < begun + LIMIT_S
        time.sleep(0.01)
    os.kill(random.choice(children(run)), signal.SIGKILL)
    ended(run)
    steps = [step for step, what, _ in told(tmp_path) if what == "loss"]
    assert steps == list(range(1, STEPS + 1)), "what was told of steps after the last checkpoint went"
    *_, kept, newest = sorted((int(path.name.split("-")[1]), path) for path in (tmp_path / "out/checkpoints").iterdir())
    shutil.rmtree(newest[1])
    file = tmp_path / "out" / "losses.jsonl"
    file.write_text(file.read_text().replace(", ", ",  ") + '{"step": 1000, "lo')  # marked; the last one half written
    run_on_ranks(launch, 3, SCRIPT, arguments(tmp_path))  # by the pool: a start by torchrun is above
    lines = file.read_text().splitlines()
    before = [json.loads(line)["step"] for line in lines if ",  " in line]
    assert max(before) == kept[0], "it goes on from a checkpoint"
    assert [step for step, what, _ in told(tmp_path) if what == "loss"] == list(range(1, STEPS + 1))
    for step, what, loss in told(tmp_path):
        assert loss == pytest.approx(wanted[step, what], rel=1e-5), (step, what)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    batch = Text.read(parse(arguments(tmp_path))).evaluation(3)
    losses = [trained(**rows).loss.item() for rows in batch]
    assert sum(losses) / len(losses) == pytest.approx(wanted[STEPS, "held_out"], rel=1e-5)
