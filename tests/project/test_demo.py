"""The demo as a user runs it, but small: exit status, output, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from examples.train_gpt import parse, read_text, train_without_pipeline, unigram_entropy, verdict

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--layers", "2", "--hidden", "48", "--heads", "2", "--sequence", "64", "--learning-rate", "1e-2"),
    *("--processes", "2", "--microbatches", "3", "--microbatch-size", "4"),
]


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *SMALL, *options]
    # A shell that runs the tests in the background has them, and what they start, ignore interrupts.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=heeds)


def test_entropy_of_known_shares() -> None:
    assert unigram_entropy(torch.tensor([7, 7, 9, 9])) == pytest.approx(0.6931471805599453, rel=1e-15)
    assert unigram_entropy(torch.tensor([3, 3, 3])) == 0.0


def test_text_is_python_source() -> None:
    assert bytes(read_text().to(torch.uint8).tolist()).count(b"import ") > 1000


@pytest.mark.parametrize(
    ("runs", "good"),
    [
        ([[4.0, 1.0], [4.0, 1.0], [4.0, 1.0]], True),
        ([[4.0, 1.0], [4.0, 1.0000009], [4.0, 1.0000009]], True),  # rounding against plain PyTorch
        ([[4.0, 1.0], [4.0, 1.000002], [4.0, 1.000002]], False),
        ([[4.0, 1.0], [4.0, 1.0], [4.0, 1.0 + 2**-52]], False),  # the pipelines agree in bits or not at all
        ([[4.0, 1.9], [4.0, 1.9], [4.0, 1.9]], False),  # not well below the entropy
    ],
)
def test_verdict(runs: list[list[float]], good: bool) -> None:
    named = dict(zip(("plain PyTorch", "1f1b", "zb-h1"), runs, strict=True))
    assert verdict(Console(quiet=True), named, entropy=2.0) is good


@pytest.mark.processes
@pytest.mark.slow
def test_small_demo_succeeds() -> None:
    with start("--steps", "60") as demo:
        output, _ = demo.communicate(timeout=240)
    assert demo.returncode == 0, output
    assert "1f1b and zb-h1: losses of all steps equal in all bits" in output
    assert output.count("in all bits") >= 12
    assert "rank 1 |" in output
    assert "bubble rate planned, with a processor for every rank: 1f1b 0." in output
    last = list(train_without_pipeline(parse([*SMALL, "--steps", "60"])))[-1]
    assert f"{last:.9f}" in output


def processes(pattern: str) -> dict[int, int]:
    """Running processes whose command line contains `pattern`, and the parent of each."""
    listing = subprocess.run(
        ["ps", "-eww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    return {int(pid): int(parent) for pid, parent, command in rows if pattern in command}


def ranks_of(demo: subprocess.Popen[str]) -> list[int]:
    """The processes of the pipeline, as soon as they are there."""
    while demo.poll() is None:
        found = [pid for pid, parent in processes("spawn_main").items() if parent == demo.pid]
        if len(found) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError(f"the demo ended before it started processes: {demo.communicate()[0]}")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill_rank", "message"), [(True, "a process of the pipeline failed: "), (False, "interrupted")]
)
def test_no_process_is_left_behind(kill_rank: bool, message: str) -> None:
    """After a rank has died, or after Ctrl-C, the demo ends with one message and takes all processes with it."""
    with start("--steps", "20") as demo:
        ranks = ranks_of(demo)
        os.kill(*(ranks[1], signal.SIGKILL) if kill_rank else (demo.pid, signal.SIGINT))
        output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert message in output
    assert "Traceback" not in output
    assert not set(ranks) & set(processes("spawn_main"))
