"""Training for long, over processes, with all that happens meanwhile: memory stays flat, and losses are those of one
process of plain torch.

python benchmarks/proofs/soak.py --count 5000 --seed 0

Small steps in float64 over gloo, with batch norm, batches of several shapes, gradients that are clipped or not finite
(`PostValidated`, with and without a barrier), evaluations, checkpoints written aside or not, and loaded again. Each
launch of two to four processes ends with a fault of one of them, and the next one, of another number of ranks, goes on
from the newest checkpoint. Prints a JSON row a launch: ranks, fault, steps, the largest difference from plain torch
among losses, evaluations and final parameters, and by how much a rank's memory grew from its 100th step on; at the end,
or at SIGTERM, a row that sums up. Exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zbfx
import zbfx.pipeline  # before processes are forked
from benchmarks.proofs.fault_matrix import forked, reaped, serve
from zbfx.optim import PostValidated
from zbfx.testing import faults

WIDTH, LAYERS, M = 8, 8, 4
ROWS = (4, 2, 3, 6, 9)  # of a microbatch; the first is the example's
MAX_NORM = 2.0
WARM = 100  # steps of a launch until memory is looked at: by then all shapes have come, in training and evaluations
LAUNCH = (100, 600)  # steps of a launch
LIMIT_S, TIMEOUT_S = 3600.0, 60.0
HEARD = ("PipelineFault", "InjectedError")  # the rank that fails as it takes its batch has its own error
MOST_DIFFERENCE, MOST_GROWN = 1e-12, 8 << 20


class Ended(BaseException):
    """Somebody wants the summary now."""


def end(*_: object) -> None:
    raise Ended


def made_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [block for _ in range(LAYERS) for block in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*blocks[:4], nn.BatchNorm1d(WIDTH), *blocks[4:]).double()


def batch(seed: int, number: int) -> tuple[Tensor, Tensor]:
    """That of a step: some have gradients that are clipped, some such that are not finite."""
    draw = random.Random(f"{seed} {number}")
    generator = torch.Generator().manual_seed(1_000_000 * seed + number)
    inputs, targets = torch.randn(2, M * draw.choice(ROWS), WIDTH, generator=generator, dtype=torch.float64)
    kind = draw.random()
    if kind < 0.05:
        targets[draw.randrange(len(targets))] = math.nan
    return inputs, targets * (100 if kind > 0.8 else 1)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """One under which rounding dies out: Adam's steps of small gradients would carry it on, tenfold every 100 steps."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.05)


class Plain:
    """One process of plain torch: losses of steps, evaluations after each, and the parameters now."""

    def __init__(self, seed: int) -> None:
        self.seed, self.model = seed, made_model()
        self.optimizer = optimizer_of(self.model.parameters())
        self.held = batch(seed, -1)
        self.losses, self.evaluations = list[float](), list[float]()

    def train(self, steps: int) -> None:
        """Until so many steps are done."""
        for number in range(len(self.losses), steps):
            self.optimizer.zero_grad()
            losses = [F.mse_loss(self.model(x), y) for x, y in zip(*cut(batch(self.seed, number)), strict=True)]
            torch.stack(losses).mean().backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            if norm.isfinite():
                self.optimizer.step()
            self.losses.append(torch.stack(losses).mean().item())
            self.evaluations.append(self.evaluate())

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        losses = [F.mse_loss(self.model(x), y) for x, y in zip(*cut(self.held), strict=True)]
        self.model.train()
        return torch.stack(losses).mean().item()


def cut(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    return (tensor.chunk(M) for tensor in tensors)


@dataclass(frozen=True)
class Launch:
    """What the processes of one launch do. `fault`: its kind, place and rank; none in the last launch. It comes as the
    process passes that place so often."""

    number: int
    seed: int
    ranks: int
    until: int
    fault: tuple[str, str, int, int] | None

    @classmethod
    def drawn(cls, number: int, seed: int, done: int, count: int) -> Launch:
        draw = random.Random(f"launch {number} of {seed}")
        ranks, steps = draw.choice((2, 3, 4)), draw.randint(*LAUNCH)
        if steps >= count - done:
            return cls(number, seed, ranks, count, None)
        rank, place = draw.randrange(ranks), draw.choice(("F", "B", "W", "send", "optimizer", "batch", "save"))
        after = steps * (2 * M if place == "send" else 1) // (20 if place == "save" else 1)
        return cls(number, seed, ranks, count, (draw.choice(("raise", "kill")), place, rank, after))

    def injected(self) -> Any:
        if self.fault is None:
            return contextlib.nullcontext()
        kind, place, rank, after = self.fault
        named = {"send": faults.SEND, "optimizer": faults.OPTIMIZER, "batch": faults.BATCH, "save": faults.SAVE}
        at = named.get(place) or faults.action(f"{place}{rank}.1")
        fault = faults.Raise() if kind == "raise" else faults.Kill()
        return faults.injected(fault, at, rank=rank, after=after)


def train(launch: Launch, rank: int, folder: Path, tell: Any) -> None:
    """What a rank does. It tells (what, after how many steps, value)."""
    model, seed = made_model(), launch.seed
    draw = random.Random(f"events of launch {launch.number} of {seed}")
    example = torch.zeros(ROWS[0], WIDTH, dtype=torch.float64)
    pipe = zbfx.compile(
        model,
        stages=launch.ranks,
        microbatches=M,
        schedule=draw.choice(("zb-h1", "1f1b", "auto")),
        loss_fn=F.mse_loss,
        example_inputs=(example,),
        example_targets=example,
        check=False,
    )
    step = pipe.bind(timeout_s=TIMEOUT_S, on_new_shape="symbolic")
    inner = optimizer_of(step.parameters())
    optimizer = PostValidated(inner, step, max_norm=MAX_NORM, sync=draw.choice((None, False)))
    held, checkpoints = batch(seed, -1), folder / "checkpoints"
    step.load(checkpoints, missing_ok=True, optimizer=optimizer)
    turn = 0
    while step.count < launch.until:
        loss = step(*batch(seed, step.count))
        optimizer.step()
        optimizer.zero_grad()
        tell("loss", step.count, loss.item())
        turn += 1
        if turn % 10 == 0:
            tell("bytes", turn, resident())
        happens = draw.random()
        if turn < 5 or happens < 0.05:
            tell("evaluation", step.count, step.evaluate(*held).item())
        elif happens < 0.1:
            step.save(checkpoints, keep=2, async_=draw.random() < 0.5, optimizer=optimizer)
            tell("save", step.count, 0.0)
        elif happens < 0.103:
            tell("load", step.count, 0.0)
            step.load(checkpoints, missing_ok=True, optimizer=optimizer)
    optimizer.settle()
    for name, value in step.full_state_dict().items():
        tell(name, step.count, value.tolist())
    step.close()


def resident() -> int:
    """The bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ranked(launch: Launch, rank: int, port: int, folder: Path) -> None:
    """The process of a rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    store = dist.TCPStore("127.0.0.1", port, launch.ranks, is_master=False)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=launch.ranks, timeout=limit)
    file = os.open(folder / f"rank {rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(*what: Any) -> None:
        os.write(file, (json.dumps(what) + "\n").encode())

    with contextlib.redirect_stderr(io.StringIO()), ExitStack() as block:
        block.enter_context(launch.injected())
        try:
            train(launch, rank, folder, tell)
            tell("ended", launch.until, "")
        except BaseException as error:
            tell("ended", -1, f"{type(error).__name__}: {error}")
    os._exit(0)


def launched(launch: Launch, folder: Path) -> tuple[list[list[Any]], int]:
    """What each rank told, and how many hang."""
    files = [folder / f"rank {rank}" for rank in range(launch.ranks)]
    for file in files:
        file.unlink(missing_ok=True)
    here, there = multiprocessing.Pipe()
    children = [forked(lambda: serve(there, LIMIT_S))]
    try:
        port = here.recv()
        for rank in range(launch.ranks):
            children.append(forked(lambda rank=rank: ranked(launch, rank, port, folder)))  # type: ignore[misc]
        host, *ranks = children
        left, children = reaped(ranks, LIMIT_S), [host]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for end in (here, there):
            end.close()
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files], left


@dataclass
class Found:
    """What all launches have shown so far."""

    plain: Plain
    steps: int = 0  # those that were done again, too
    difference: float = 0.0
    grown: int = 0
    events: Counter[str] = field(default_factory=Counter)
    wrong: int = 0

    def row(self, launch: Launch, told: list[list[Any]], left: int) -> dict[str, Any]:
        """Compare what a launch told with plain torch."""
        events = Counter(what for what, _, _ in told[-1] if what in ("loss", "evaluation", "save", "load"))
        everything = [entry for entries in told for entry in entries]
        self.plain.train(max((number for what, number, _ in everything if what == "loss"), default=0))
        differences = [self.off(*entry) for entry in everything]
        held = ([value for what, turn, value in entries if what == "bytes" and turn >= WARM] for entries in told)
        grown = max(map(grown_by, held))
        ends = [value for what, _, value in everything if what == "ended"]
        wrong = list[str]()
        if left:
            wrong.append(f"{left} processes hang")
        if launch.fault is None:
            wrong += [end for end in ends if end]
        else:
            due = launch.ranks - (launch.fault[0] == "kill")
            if len(ends) != due or not all(end.startswith(HEARD) for end in ends):
                wrong.append(f"expected {due} ranks that hear of a fault; found {ends}")
        most = max(differences, default=0.0)
        if most > MOST_DIFFERENCE:
            wrong.append(f"{most} from plain torch")
        if grown > MOST_GROWN:
            wrong.append(f"memory grew by {grown:,} bytes")
        self.steps, self.events = self.steps + events["loss"], self.events + events
        self.difference, self.grown = max(self.difference, most), max(self.grown, grown)
        self.wrong += bool(wrong)
        said = {"launch": launch.number, "ranks": launch.ranks, "fault": launch.fault, **events}
        return said | {"difference": most, "grown_mb": round(grown / 1e6, 2), "wrong": wrong}

    def off(self, what: str, number: int, value: Any) -> float:
        """By how much something told is another number than plain torch's."""
        if what in ("bytes", "save", "load", "ended"):
            return 0.0
        if what in ("loss", "evaluation"):
            own = (self.plain.losses if what == "loss" else self.plain.evaluations)[number - 1]
        else:
            own = self.plain.model.state_dict()[what].tolist()
        one, other = torch.tensor(own, dtype=torch.float64), torch.tensor(value, dtype=torch.float64)
        apart = (one - other).abs() / one.abs().clamp(min=1.0)
        return float(torch.where(one.isnan() & other.isnan(), 0.0, apart).nan_to_num(math.inf).max())


def grown_by(held: Sequence[int]) -> int:
    """By how much the last tenth of these sizes is above the first tenth, each in its mean."""
    part = len(held) // 10 or 1
    return max(0, int(sum(held[-part:]) / part - sum(held[:part]) / part)) if len(held) > part else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    before = signal.signal(signal.SIGTERM, end)
    found, number, ended = Found(Plain(asked.seed)), 0, False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            while not ended:
                launch = Launch.drawn(number, asked.seed, len(found.plain.losses), asked.count)
                print(json.dumps(found.row(launch, *launched(launch, folder))), flush=True)
                ended, number = launch.fault is None, number + 1
        except Ended:
            print("SIGTERM", flush=True)
        finally:
            signal.signal(signal.SIGTERM, before)
    print(
        json.dumps(
            {
                "launches": number,
                "steps": len(found.plain.losses),
                "done": found.steps,
                **found.events,
                "difference": found.difference,
                "grown_mb": round(found.grown / 1e6, 2),
                "wrong": found.wrong,
            }
        )
    )
    return min(found.wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
