"""Processes killed at random moments: those that are left train on, with the losses and parameters, in all bits, of a
run in which they ended between two steps.

python benchmarks/proofs/survival.py --count 100 --seed 0

Two ranks, over gloo, in two replicas and in three. Prints a JSON row a run: who was killed and when, which step ran
again, how long the step took in which they were replaced, and what is wrong; then a row that sums up. Exits 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zbfx
import zbfx.pipeline  # before processes are forked
from benchmarks.proofs.fault_matrix import LIMIT_S, forked, reaped, serve
from zbfx.testing import faults

STEPS, SPAN_S = 30, 0.5  # a run's steps, and in which of its seconds processes are killed
RANKS = 2
M, ROWS, WIDTH = 3, 2, 8
# The process; the action or other place, and how often it is passed before; or after how many seconds of training.
Kills = Sequence[tuple[int, str | float, int]]

PLACES = {"send": faults.SEND, "optimizer": faults.OPTIMIZER, "batch": faults.BATCH}


class Centred(nn.Module):
    """Subtracts a mean of the microbatches before, a buffer: losses depend on what each replica has seen."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found = x - self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return found


def pipeline(ranks: int, layers: int = 4) -> zbfx.Pipeline:
    torch.manual_seed(0)
    blocks = [
        block
        for number in range(layers)
        for block in (
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.2),
            nn.Tanh(),
            Centred() if number % 2 else nn.BatchNorm1d(WIDTH),
        )
    ]
    rows = torch.randn(ROWS, WIDTH)
    return zbfx.compile(
        nn.Sequential(*blocks),
        stages=ranks,
        microbatches=M,
        schedule="zb-h1",
        loss_fn=F.mse_loss,
        example_inputs=(rows,),
        example_targets=rows,
        check=False,
    )


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    inputs, targets = torch.randn(2, M * ROWS, WIDTH, generator=generator)
    return inputs, targets


def trained(rank: int, replicas: int, ranks: int, steps: int, kills: Kills, survive: bool = True) -> dict[str, Any]:
    """Losses and parameters after training; every second step accumulates onto the gradients of the one before."""
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp"))
    pipe = pipeline(ranks)
    step = pipe.bind(mesh, survive=survive, timeout_s=60.0, seed=3)
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    losses, seconds = [], []
    with ExitStack() as block, contextlib.redirect_stderr(io.StringIO()) as printed:
        for process, place, after in kills:
            if isinstance(place, float):
                if process == rank:
                    threading.Timer(place, os.kill, (os.getpid(), signal.SIGKILL)).start()
                continue
            at = PLACES.get(place) or faults.action(place)
            block.enter_context(faults.injected(faults.Kill(), at, rank=process, after=after))
        for number in range(steps):
            begun = time.monotonic()
            losses.append(step(*batch(number, rank // ranks)).item())
            seconds.append(time.monotonic() - begun)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    found = {
        "losses": losses,
        "parameters": {name: parameter.detach().clone() for name, parameter in step.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in step.named_buffers()},
        "printed": [line for line in printed.getvalue().splitlines() if line.startswith("zbfx: ")],
        "seconds": max(seconds),
    }
    step.close()
    return found


def ranked(rank: int, port: int, file: Path, replicas: int, kills: Kills, steps: int) -> None:
    """The process of a rank."""
    world = replicas * RANKS
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT_S))
    try:
        found = trained(rank, replicas, RANKS, steps, kills)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    torch.save(found, f"{file}.begun")
    os.rename(f"{file}.begun", file)
    os._exit(0)


def launched(replicas: int, kills: Kills, steps: int = STEPS) -> tuple[dict[int, Any], int]:
    """What each process that is left has found, and how many hang."""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / f"rank {rank}" for rank in range(replicas * RANKS)]
        here, there = multiprocessing.Pipe()
        host = forked(lambda: serve(there))
        port = here.recv()
        children = [
            forked(lambda rank=rank: ranked(rank, port, files[rank], replicas, kills, steps))  # type: ignore[misc]
            for rank in range(len(files))
        ]
        left = reaped(children, LIMIT_S)
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
        return {rank: torch.load(file) for rank, file in enumerate(files) if file.exists()}, left


@cache
def reference(replicas: int, ends: Kills) -> dict[int, Any]:
    """A run in which processes end before they take the batch of a step."""
    return launched(replicas, ends)[0]


def row(replicas: int, kills: Kills) -> dict[str, Any]:
    found, left = launched(replicas, kills)
    errors = {rank: found.pop(rank)["error"] for rank in sorted(found) if "error" in found[rank]}
    printed = [line for rank in found.values() for line in rank["printed"] if "has ended" in line]
    steps = [(int(step), again == "runs again") for line in printed for step, again in STEP.findall(line)]
    result = {"replicas": replicas, "killed": kills, "steps": steps, "left": left}
    result["seconds"] = round(max((rank["seconds"] for rank in found.values()), default=0.0), 2)
    said = [f"rank {rank}: {error}" for rank, error in errors.items()]
    return result | {"wrong": [*said, *wrong(result, found)]}


STEP = re.compile(r"Step (\d+) (runs again|is over)")


def wrong(result: dict[str, Any], found: dict[int, Any]) -> list[str]:
    """What is not as it should be."""
    replicas, kills = result["replicas"], result["killed"]
    if result["left"] or len(found) < replicas * RANKS - len(kills):
        return [f"{result['left']} processes hang, {len(found)} have results"]
    if not result["steps"]:
        return []  # killed after the last step, or before the first
    expected = reference(replicas, ends_of(replicas, kills, result["steps"]))
    return [f"rank {rank} has other bits" for rank in found if not same(found[rank], expected[rank])]


def ends_of(replicas: int, kills: Kills, steps: Sequence[tuple[int, bool]]) -> Kills:
    """The same deaths, between two steps. Two replicas are added up alike whoever does it: then there are none."""
    if replicas == 2:
        return ()
    ((process, _, _),), ((step, again), *_) = kills, steps
    return ((process, "batch", step - 1 if again else step),)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["losses"] == other["losses"] and all(
        torch.equal(one[kind][name], value) for kind in ("parameters", "buffers") for name, value in other[kind].items()
    )


def drawn(generator: random.Random) -> tuple[int, Kills]:
    """Replicas, and who is killed when: in two replicas sometimes one process of each, and of each rank."""
    replicas = generator.choice([2, 3])
    process = generator.randrange(replicas * RANKS)
    kills = [(process, generator.uniform(0.0, SPAN_S), 0)]
    if replicas == 2 and generator.random() < 0.4:
        kills.append((3 - process, generator.uniform(0.0, SPAN_S), 0))
    return replicas, tuple(kills)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    generator, rows = random.Random(asked.seed), []
    for _ in range(asked.count):
        rows.append(row(*drawn(generator)))
        print(json.dumps(rows[-1]), flush=True)
    lost = [found["seconds"] for found in rows if found["steps"]]
    bad = sum(bool(found["wrong"]) for found in rows)
    middle, most = (round(median(lost), 2), max(lost)) if lost else (0.0, 0.0)
    print(json.dumps({"runs": len(rows), "replaced": len(lost), "median_s": middle, "most_s": most, "wrong": bad}))
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
