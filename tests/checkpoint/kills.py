"""Kills processes while they save, at random moments, and looks at what is there.

python -m tests.checkpoint.kills --times 200   prints what was found; exits 1 if a checkpoint was lost, or is a mixture

Children are forked from a process that has imported all. All numbers of the model and of the optimizer's state are the
step's count as it saves: a checkpoint of several counts, or of one that was never whole, shows.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zbfx
from zbfx.checkpoint import distributed
from zbfx.checkpoint.folders import checkpoints, newest
from zbfx.checkpoint.writing import others_of

KEPT = 2
WIDTH = 64
LAYERS = 4


def stepping(ranks: int, *, bound: bool) -> tuple[Any, torch.optim.Optimizer]:
    """A step that does not train: its numbers are set by hand."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    rows = torch.zeros(1, WIDTH)
    pipe = zbfx.compile(
        model,
        stages=ranks,
        microbatches=2,
        schedule="1f1b",
        loss_fn=F.mse_loss,
        example_inputs=(rows,),
        example_targets=rows,
        check=False,
    )
    step = pipe.bind(timeout_s=20) if bound else pipe.run_local()
    return step, torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9)


@torch.no_grad()
def set_numbers(step: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    for parameter in step.parameters():
        parameter.fill_(number)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)


def saving(rank: int, ranks: int, folder: Path, is_async: bool, told: int) -> None:
    """Save step after step, and tell the number of each as soon as it is whole."""
    if ranks > 1:
        store = dist.FileStore(f"{folder}.store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    step, optimizer = stepping(ranks, bound=ranks > 1)
    os.write(told, b"ready\n")
    for count in range(1, 10_000):
        set_numbers(step, optimizer, count)
        step.count = count
        found = step.save(folder, keep=KEPT, async_=is_async, optimizer=optimizer)
        set_numbers(step, optimizer, 0)  # what is written is of the moment of the call
        found.wait()
        os.write(told, f"{count}\n".encode())


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        if not os.environ.get("SHOW"):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


@dataclass(frozen=True)
class Killing:
    """How many ranks save, whether aside, and which of them are killed after so many seconds."""

    ranks: int
    is_async: bool
    all_of_them: bool
    after_s: float

    @property
    def kind(self) -> str:
        who = "all" if self.all_of_them or self.ranks == 1 else "one"
        return f"{self.ranks} ranks, {'async' if self.is_async else 'sync'}, {who} killed"


def killed(folder: Path, killing: Killing) -> int:
    """Start ranks that save, kill one or all of them; the last checkpoint that a rank has called whole."""
    ends = [os.pipe() for _ in range(killing.ranks)]
    children = []
    for rank, (_, write) in enumerate(ends):
        arguments = (rank, killing.ranks, folder, killing.is_async, write)
        children.append(forked(lambda arguments=arguments: saving(*arguments)))  # type: ignore[misc]
    for _, write in ends:
        os.close(write)
    for read, _ in ends:
        assert os.read(read, 6) == b"ready\n"
    time.sleep(killing.after_s)
    victims = children if killing.all_of_them else [random.choice(children)]
    for child in victims:
        os.kill(child, signal.SIGKILL)
    if not killing.all_of_them:
        time.sleep(0.05)  # the others go on meanwhile, as far as they can
    last = 0
    for child, (read, _) in zip(children, ends, strict=True):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(read) as file:
            last = max([last, *(int(line) for line in file.read().splitlines())])
    return last


def looked_at(folder: Path, told: int) -> str:
    """What is wrong with the checkpoints of a folder; "" if nothing is."""
    found = checkpoints(folder)
    if not found:
        return f"step {told} was whole, and is lost" if told else ""
    for path in found:
        if error := mixture(path):
            return error
    count = others_of(newest(folder))["count"]
    return "" if count >= told else f"step {told} was whole, and the newest is of step {count}"


def mixture(path: Path) -> str:
    table, count = distributed.table_of(path), others_of(path)["count"]
    entries = distributed.stored_tensors(table)
    targets = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    distributed.read_into(path, table, targets)
    if len(targets) != 4 * LAYERS:
        return f"{path.name} has {len(targets)} tensors, not {2 * LAYERS} parameters with their momenta"
    wrong = [key for key, value in targets.items() if not bool((value == count).all())]
    return f"{path.name} has other numbers than {count} in {wrong}" if wrong else ""


def kill_often(times: int, seed: int, ranks: tuple[int, ...] = (1, 2)) -> tuple[Counter[str], list[str]]:
    """How many saves of each kind were killed, and what was wrong after that."""
    random.seed(seed)
    kinds, wrong = Counter[str](), list[str]()
    for index in range(times):
        chosen = random.random() < 0.5, random.random() < 0.5, random.uniform(0.0, 0.15)
        killing = Killing(ranks[index % len(ranks)], *chosen)
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "run"
            told = killed(folder, killing)
            kinds[killing.kind] += 1
            kinds["left half a checkpoint"] += bool(list(folder.glob(".partial-*")))
            kinds["had a whole one"] += bool(told)
            if error := looked_at(folder, told):
                wrong.append(f"{killing}: {error}")
    return kinds, wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds, wrong = kill_often(arguments.times, arguments.seed)
    print(*(f"{count:5} {kind}" for kind, count in sorted(kinds.items())), sep="\n")
    print(f"{len(wrong)} wrong", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
