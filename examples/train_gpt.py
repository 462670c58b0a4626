"""Train a byte-level GPT three times: in one process without a pipeline, and over four processes with 1F1B and ZB-H1.

    python examples/train_gpt.py

The text is the source code of Python's standard library. The runs start from the same weights and see the same
batches, so their losses must agree: the two pipelines bit for bit, and both with plain PyTorch to rounding. The exit
status is 0 if they do and if the model has learnt more than how often each byte occurs.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import sysconfig
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import zbfx

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository, which holds the model

from benchmarks.gpt import GPT, GPTConfig, next_token_loss  # an ordinary nn.Module

SCHEDULES = ("1f1b", "zb-h1")
ROUNDING = 1e-6  # relative difference allowed between a pipeline's losses and plain PyTorch's


@dataclass(frozen=True)
class Job:
    """What to train, and for how long."""

    steps: int
    processes: int
    microbatches: int
    microbatch_size: int
    learning_rate: float
    model: GPTConfig

    @property
    def tokens_per_step(self) -> int:
        return self.microbatches * self.microbatch_size * self.model.sequence


def read_text() -> Tensor:
    """The bytes of the standard library's top-level modules."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if len(source) < 1_000_000:
        raise SystemExit(f"the text to train on, {folder}/*.py, has only {len(source)} bytes")
    return torch.frombuffer(bytearray(source), dtype=torch.uint8).long()


def unigram_entropy(text: Tensor) -> float:
    """The loss, in nats a byte, of a model that knows how often each byte occurs and nothing else."""
    share = torch.bincount(text).double() / len(text)
    return float(-torch.special.xlogy(share, share).sum())


def batches(job: Job, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each step's bytes and the bytes that follow them, (batch, sequence) each; the same in every process."""
    randomness = torch.Generator().manual_seed(1)
    size = job.microbatches * job.microbatch_size
    for _ in range(job.steps):
        starts = torch.randint(len(text) - job.model.sequence, (size, 1), generator=randomness)
        window = text[starts + torch.arange(job.model.sequence + 1)]
        yield window[:, :-1], window[:, 1:]


def new_model(job: Job) -> GPT:
    torch.manual_seed(0)
    return GPT(job.model)


def new_optimizer(job: Job, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=job.learning_rate)


def pipeline(job: Job | None = None, schedule: str = "zb-h1") -> dict[str, Any]:
    """The arguments of zbfx.compile; `python -m zbfx check examples/train_gpt.py:pipeline` calls this too."""
    job = job or parse([])
    microbatch = torch.zeros(job.microbatch_size, job.model.sequence, dtype=torch.long)
    return {
        "model": new_model(job),
        "stages": job.processes,
        "microbatches": job.microbatches,
        "example_inputs": (microbatch,),
        "example_targets": microbatch,
        "loss_fn": next_token_loss,
        "schedule": schedule,
    }


def compiled(job: Job, schedule: str) -> zbfx.Pipeline:
    return zbfx.compile(**pipeline(job, schedule))


def train_without_pipeline(job: Job) -> Iterator[float]:
    """Plain PyTorch with gradient accumulation; yields the loss of each step."""
    torch.set_num_threads(1)
    model = new_model(job)
    optimizer = new_optimizer(job, model.parameters())
    for ids, targets in batches(job, read_text()):
        losses = []
        for microbatch in zip(ids.split(job.microbatch_size), targets.split(job.microbatch_size), strict=True):
            loss = next_token_loss(model(microbatch[0]), microbatch[1])
            (loss / job.microbatches).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        yield float(torch.stack(losses).mean())


def train_rank(rank: int, job: Job, port: int, losses: Any) -> None:
    """One process of the pipelines; rank 0 puts the loss of each step into the queue `losses`."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.processes)
    for schedule in SCHEDULES:
        step = compiled(job, schedule).bind()
        optimizer = new_optimizer(job, step.parameters())  # the parameters of this rank's stage
        for ids, targets in batches(job, read_text()):
            loss = step(ids, targets)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                losses.put(float(loss))
        step.close()
    dist.destroy_process_group()


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Processes started meanwhile leave Ctrl-C to this one."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def train_pipelines(job: Job) -> Generator[float, None, None]:
    """Start a process for each rank, and yield the losses that rank 0 reports, of one schedule after the other. No
    process outlives the generator."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a free port
    losses = mp.get_context("spawn").SimpleQueue()
    with interrupts_ignored():
        ranks = mp.spawn(train_rank, (job, store.port, losses), job.processes, join=False, daemon=True)
    assert ranks is not None, "join=False gives the processes back"
    try:
        ended = False
        while not ended:
            ended = ranks.join(timeout=0.1)  # raises if a process failed
            while not losses.empty():
                yield losses.get()
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def follow(console: Console, name: str, job: Job, losses: Iterator[float]) -> list[float]:
    """Collect the losses of a run under a progress bar."""
    columns = (
        TextColumn(f"{name:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    seen: list[float] = []
    begun = math.nan
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=job.steps, loss=math.nan, speed=math.nan)
        for loss in losses:
            seen.append(loss)
            now = time.perf_counter()
            begun = now if len(seen) == 1 else begun  # the first step includes the start of the processes
            # Losses of the first steps may arrive together.
            speed = (len(seen) - 1) * job.tokens_per_step / (now - begun) if now - begun > 0.5 else math.nan
            progress.update(bar, advance=1, loss=loss, speed=speed)
    return seen


def loss_table(runs: dict[str, list[float]], rows: int = 12) -> Table:
    """The losses of all runs, step by step; about `rows` steps of them."""
    table = Table("step", *runs, "pipelines agree", title="loss, nats a byte", title_justify="left")
    steps = len(next(iter(runs.values())))
    for index in sorted({round(k * (steps - 1) / (rows - 1)) for k in range(rows)}):
        losses = [run[index] for run in runs.values()]
        same = len({losses[list(runs).index(schedule)] for schedule in SCHEDULES}) == 1
        table.add_row(str(index + 1), *(f"{loss:.9f}" for loss in losses), "in all bits" if same else "NO")
    return table


def verdict(console: Console, runs: dict[str, list[float]], entropy: float) -> bool:
    """Print how closely the runs agree and how much was learnt; True if both are as they should be."""
    plain, *pipelines = runs.values()
    same = all(run == pipelines[0] for run in pipelines)
    apart = max(abs(a - b) / abs(b) for a, b in zip(pipelines[0], plain, strict=True))
    tail = plain[-max(1, len(plain) // 10) :]
    final = sum(tail) / len(tail)
    console.print(f"{' and '.join(SCHEDULES)}: losses of all steps {'equal in all bits' if same else 'DIFFER'}")
    closeness = "equal in all bits" if apart == 0 else f"largest relative difference {apart:.1e}"
    console.print(f"pipeline and plain PyTorch: {closeness} (allowed: {ROUNDING:.0e})")
    console.print(f"loss {final:.3f} at the end; a model of byte frequencies alone has {entropy:.3f} nats a byte")
    return same and apart <= ROUNDING and final < 0.9 * entropy


def parse(arguments: Sequence[str] | None) -> Job:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--processes", type=int, default=4, help="ranks of the pipeline, one stage each (default: 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="a step (default: 8)")
    parser.add_argument("--microbatch-size", type=int, default=2, help="sequences a microbatch (default: 2)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=176)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128, help="bytes a sequence (default: 128)")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if value <= 0:
            parser.error(f"--{name.replace('_', '-')}: expected a number above 0; found {value}")
    if options.hidden % options.heads or options.processes > options.layers:
        parser.error("--hidden divides by --heads, and every process gets a layer: --processes is at most --layers")
    model = GPTConfig(options.layers, options.hidden, options.heads, options.sequence, vocabulary=256)
    return Job(
        options.steps,
        options.processes,
        options.microbatches,
        options.microbatch_size,
        options.learning_rate,
        model,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    job = parse(arguments)
    console = Console()
    text = read_text()
    size = sum(parameter.numel() for parameter in new_model(job).parameters())
    console.print(f"GPT with {size / 1e6:.2f} M parameters on {len(text) / 1e6:.1f} MB of Python source\n")
    plans = {schedule: compiled(job, schedule).schedule for schedule in SCHEDULES}
    for plan in plans.values():
        console.print(f"{plan}\n", soft_wrap=True, highlight=False)
    runs = {"plain PyTorch": follow(console, "plain PyTorch", job, train_without_pipeline(job))}
    with closing(train_pipelines(job)) as losses:
        for schedule in SCHEDULES:
            runs[schedule] = follow(console, schedule, job, islice(losses, job.steps))
        assert next(losses, None) is None, "the processes have ended, too"
    console.print()
    console.print(loss_table(runs))
    rates = ", ".join(f"{schedule} {plan.bubble_rate:.3f}" for schedule, plan in plans.items())
    console.print(f"bubble rate planned, with a processor for every rank: {rates}")
    return 0 if verdict(console, runs, unigram_entropy(text)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except zbfx.ZbfxError as error:
        sys.exit(f"error: {error}")
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as failure:
        sys.exit(f"a process of the pipeline failed: {failure}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
