"""Every kind of fault, at every place, on every rank: how long until all ranks have said why, and what they say.

python benchmarks/proofs/fault_matrix.py                      all cases over gloo, two ranks
python benchmarks/proofs/fault_matrix.py --kinds kill --places F save

Prints a JSON row a case: `seconds` from the fault until the last rank has ended its call, `said` by each other rank,
`left`, processes that had to be ended. `wrong` says what is not as it should be; exits 1 if anything is. Expected are:
raise, kill, corrupt, disk full: every rank raises within 15 s; hang and stop: within `TIMEOUT_S` and 15 s; wrong batch:
all raise; slow and clock jump: training goes on, with the losses of a run without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zbfx
from zbfx.testing import faults

TIMEOUT_S = 5.0
SOON_S = 15.0
STANDS_S = TIMEOUT_S + 6.0  # how long a rank hangs, or is stopped
LIMIT_S = 90.0  # for a case
STEPS, SAVES = 5, 2  # training steps, and after which one it saves
WORLD = 2


@dataclass(frozen=True)
class Fate:
    """What a kind of fault does, and what is expected of all ranks within `within_s`; None: that training goes on."""

    fault: Callable[[], faults.Fault]
    within_s: float | None
    only: str = ""  # the only place where it can strike
    times: int | None = 1


KINDS = {
    "raise": Fate(faults.Raise, SOON_S),
    "kill": Fate(faults.Kill, SOON_S),
    "hang": Fate(lambda: faults.Hang(STANDS_S), TIMEOUT_S + SOON_S),
    "stop": Fate(lambda: faults.Stop(STANDS_S), TIMEOUT_S + SOON_S),
    "slow": Fate(lambda: faults.Slow(0.2), None, times=None),
    "clock jump": Fate(lambda: faults.ClockJump(-86400.0), None),
    "corrupt": Fate(lambda: faults.Corrupt(byte=5, bit=6), SOON_S, only="send"),
    "disk full": Fate(faults.DiskFull, SOON_S, only="save"),
    "wrong batch": Fate(faults.WrongBatch, SOON_S, only="batch"),
}


def places(rank: int) -> dict[str, tuple[faults.Spot, int]]:
    """Each place on a rank, and how often it is passed before the fault."""
    return {
        "F": (faults.action(f"F{rank}.1"), 1),
        "B": (faults.action(f"B{rank}.0"), 2),
        "W": (faults.action(f"W{rank}.2"), 1),
        "send": (faults.SEND, 12),
        "optimizer": (faults.OPTIMIZER, 1),
        "save": (faults.SAVE, 0),
        "batch": (faults.BATCH, 2),
        "bind": (faults.BIND, 0),
        "compile": (faults.COMPILE, 0),
    }


def cases() -> Iterator[tuple[str, str, int]]:
    for kind, fate in KINDS.items():
        for place in places(0):
            if place == fate.only or not (fate.only or place == "batch"):
                yield from ((kind, place, rank) for rank in range(WORLD))


@dataclass(frozen=True)
class Timed:
    """A fault that first writes into a file when it strikes: a process that is killed tells nobody."""

    fault: faults.Fault
    file: Path

    @property
    def places(self) -> tuple[faults.Spot, ...]:
        return self.fault.places

    def strike(self, work: Any, args: tuple[Any, ...], block: ExitStack) -> Any:
        if not self.file.exists():
            self.file.write_text(repr(time.monotonic()))  # of the host, the same in all processes
        return self.fault.strike(work, args, block)


def train(folder: Path | None = None) -> list[float]:
    """Compile, bind, train, and save once; the losses. Without a folder: in this process alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block for _ in range(4) for block in (nn.Linear(8, 8), nn.Tanh())))
    inputs, targets = torch.randn(6, 8), torch.randn(6, 8)
    pipe = zbfx.compile(
        model,
        stages=WORLD,
        microbatches=3,
        schedule="zb-h1",
        loss_fn=F.mse_loss,
        example_inputs=(inputs[:2],),
        example_targets=targets[:2],
        check=False,
    )
    step = pipe.bind(timeout_s=TIMEOUT_S, checksums=True, check_batches=1) if folder else pipe.run_local()
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    losses = []
    for count in range(1, STEPS + 1):
        losses.append(step(inputs, targets).item())
        optimizer.step()
        optimizer.zero_grad()
        if count == SAVES and folder:
            step.save(folder, optimizer=optimizer)
    step.close()
    return losses


def ranked(rank: int, port: int, folder: Path, kind: str, place: str, victim: int) -> None:
    """The process of a rank. An exception ends it as it ends a script: the hook of uncaught ones is called."""
    store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=False)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=limit)
    fate, (at, after) = KINDS[kind], places(victim)[place]
    found: dict[str, Any] = {"type": "", "text": "", "losses": None}
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            timed = Timed(fate.fault(), folder / "struck")
            with faults.injected(timed, at, rank=victim, after=after, times=fate.times):
                found["losses"] = train(folder / "checkpoints")
        except BaseException as error:
            found |= {"type": type(error).__name__, "text": str(error), "ended_s": time.monotonic()}
            sys.excepthook(*sys.exc_info())
    found.setdefault("ended_s", time.monotonic())
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("zbfx: ")]
    (folder / f"rank {rank}").write_text(json.dumps(found | {"printed": lines[:1]}))
    os._exit(0)


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    with contextlib.suppress(BaseException):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        work()
    os._exit(1)


def serve(pipe: Any, seconds: float = LIMIT_S) -> None:
    """The process of the store, which is no rank, as under torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(seconds)


def reaped(children: Sequence[int], limit_s: float) -> int:
    """Wait for processes; how many had to be ended."""
    left, deadline = set(children), time.monotonic() + limit_s
    while left and time.monotonic() < deadline:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(left)


def row(kind: str, place: str, victim: int) -> dict[str, Any]:
    """Run a case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here, there = multiprocessing.Pipe()
        host = forked(lambda: serve(there))
        port = here.recv()
        children = [
            forked(lambda rank=rank: ranked(rank, port, folder, kind, place, victim))  # type: ignore[misc]
            for rank in range(WORLD)
        ]
        left = reaped(children, LIMIT_S)
        os.kill(host, signal.SIGKILL)
        os.waitpid(host, 0)
        files = {rank: folder / f"rank {rank}" for rank in range(WORLD)}
        found = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
        struck = folder / "struck"
        struck_s = float(struck.read_text()) if struck.exists() else None
    others = [outcome for rank, outcome in found.items() if rank != victim]
    ended_s = max((outcome["ended_s"] for outcome in others), default=None)
    result = {
        "kind": kind,
        "place": place,
        "rank": victim,
        "seconds": None if None in (struck_s, ended_s) else round(ended_s - struck_s, 2),  # type: ignore[operator]
        "type": others[0]["type"] if others else None,
        "said": [outcome["text"][:300] for outcome in others],
        "own": found[victim]["text"][:300] if victim in found else None,
        "left": left,
    }
    return result | {"wrong": list(wrong(result, found, struck_s))}


@cache
def undisturbed() -> list[float]:
    """The losses of a run without a fault."""
    return train()


def wrong(result: dict[str, Any], found: dict[int, Any], struck_s: float | None) -> Iterator[str]:
    """What is not as it should be."""
    within_s, victim = KINDS[result["kind"]].within_s, result["rank"]
    if result["left"]:
        yield f"{result['left']} processes were left"
    if struck_s is None:
        yield "the fault never struck"
        return
    if len(found) < WORLD - (result["kind"] == "kill"):
        yield "a rank said nothing"
        return
    if within_s is None:
        others = {rank: outcome for rank, outcome in found.items() if outcome["losses"] != undisturbed()}
        yield from (f"rank {rank}: {outcome['text'] or outcome['losses']}" for rank, outcome in others.items())
        return
    for rank, outcome in found.items():
        if not outcome["type"]:
            yield f"rank {rank} ended without an error"
        if rank != victim and not outcome["text"]:
            yield f"rank {rank} has no message"
    if result["seconds"] > within_s:
        yield f"took longer than {within_s:g} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--places", nargs="*", default=list(places(0)), choices=list(places(0)))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    for kind, place, rank in cases():
        if kind in asked.kinds and place in asked.places:
            found = row(kind, place, rank)
            print(json.dumps(found), flush=True)
            bad += bool(found["wrong"])
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
