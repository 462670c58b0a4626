"""Whole training steps, with optimizer and clipping, beside what a user would pick instead, on unmodified models.

    python -m benchmarks.throughput.whole_step --systems plain zbfx --microbatches 8
    torchrun --nproc-per-node=2 -m benchmarks.throughput.whole_step --systems ddp fsdp zbfx --microbatches 16

Systems: `plain`, one process, each block compiled by torch.compile, gradients accumulated; `ddp` and `fsdp`, the same
over all processes, which share the microbatches; `zbfx`, a pipeline over all processes, compiled and captured. Each
takes the same microbatches, AdamW (fused on GPUs), and float32 masters under autocast or bfloat16. One JSON object a
line: milliseconds of a step in a row of steps (the median, on the slowest rank), losses of the first steps, which are
to be equal, peak memory; of zbfx what was planned, and what each rank did in one step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zbfx
from benchmarks.measure import Marks, peak_gib, synchronize
from benchmarks.report import append_row, environment
from benchmarks.throughput.families import FAMILIES, TINY, Family
from benchmarks.throughput.phases import PRECISIONS, mode, typed
from benchmarks.throughput.timeline import rank_rows
from zbfx.handle import Pipeline

SYSTEMS = ("plain", "ddp", "fsdp", "zbfx")
MAX_NORM, RATE = 1.0, 1e-4
WARM_STEPS, TIMED_STEPS = 5, 12

Step = Callable[[], Tensor]  # a whole training step; its loss


@dataclass(frozen=True)
class Asked:
    """What every system trains: `m` microbatches of `family`, in `precision`, on `device`."""

    family: Family
    precision: str
    m: int
    device: torch.device
    schedule: str
    overlap: bool = True  # of zbfx

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def model(self) -> Any:
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.family.build().train()
        return model.to(torch.bfloat16 if self.precision == "bf16" else torch.float32)

    def batch(self) -> dict[str, Tensor]:
        return typed(self.family.batch(self.m * self.family.rows, self.device), self.precision)

    def adam(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=RATE, fused=self.device.type == "cuda")


def accumulated(asked: Asked, model: Any, batch: Mapping[str, Tensor], last: Callable[[bool], Any], count: int) -> Step:
    """A step of plain PyTorch: `count` microbatches of this process. `last` prepares the model for one of them."""
    optimizer = asked.adam(model.parameters())
    parts = [dict(zip(batch, one, strict=True)) for one in zip(*(v.chunk(count) for v in batch.values()), strict=True)]

    def step() -> Tensor:
        total = torch.zeros((), device=asked.device)
        for index, part in enumerate(parts):
            with last(index == count - 1):
                with nullcontext() if asked.precision == "bf16" else torch.autocast(asked.device.type, torch.bfloat16):
                    loss = model(**part).loss / count
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def plain(asked: Asked) -> Step:
    model = asked.model()
    asked.family.compiled(model)
    return accumulated(asked, model, asked.batch(), lambda _: nullcontext(), asked.m)


def own_part(asked: Asked) -> dict[str, Tensor]:
    return {name: value.chunk(asked.ranks)[dist.get_rank()] for name, value in asked.batch().items()}


def ddp(asked: Asked) -> Step:
    model = asked.model()
    asked.family.compiled(model)
    whole = nn.parallel.DistributedDataParallel(model)
    return accumulated(
        asked, whole, own_part(asked), lambda last: nullcontext() if last else whole.no_sync(), asked.m // asked.ranks
    )


def fsdp(asked: Asked) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = asked.model()
    wide = torch.bfloat16 if asked.precision == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=wide)
    asked.family.compiled(model)
    for block in asked.family.blocks(model):
        fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)

    def last(is_last: bool) -> Any:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        model.set_is_last_backward(is_last)
        return nullcontext()

    return accumulated(asked, model, own_part(asked), last, asked.m // asked.ranks)


@dataclass(frozen=True)
class Pipelined:
    """A whole step of a pipeline."""

    pipe: Pipeline
    run: Any
    optimizer: Any
    batch: Mapping[str, Tensor]

    def __call__(self) -> Tensor:
        loss = self.run(**self.batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return cast(Tensor, loss)

    def told(self, pictures: Path | None) -> dict[str, Any]:
        """The plan, and what each rank did in one step, of which a picture is drawn."""
        profile = self.run.profile(**self.batch)
        self.optimizer.zero_grad()
        if pictures and dist.get_rank() == 0:
            pictures.write_text(profile.svg())
        planned_s = self.pipe.schedule.expected_s or self.pipe.schedule.iteration_s
        return {
            "schedule": self.pipe.schedule.name,
            "planned_ms": round(1e3 * planned_s, 2),
            "planned_gib": [memory.peak_bytes / 2**30 for memory in self.pipe.memory],
            "ranks": rank_rows(profile),
        }


def pipelined(asked: Asked) -> Pipelined:
    model, batch = asked.model(), asked.batch()
    on_gpu = asked.device.type == "cuda"
    with mode(asked.precision, asked.device):
        pipe = zbfx.compile(
            model,
            stages=asked.ranks,
            microbatches=asked.m,
            example_kwargs={name: value[: asked.family.rows] for name, value in batch.items()},
            schedule=asked.schedule,
            backend="cudagraph+inductor" if on_gpu else "eager",
            costs="measure" if on_gpu and asked.ranks > 1 else "estimate",
            device=asked.device,
            overlap=None if asked.overlap else False,
        )
    run = pipe.bind(timeout_s=120)
    return Pipelined(pipe, run, zbfx.optim.PostValidated(asked.adam(run.parameters()), run, max_norm=MAX_NORM), batch)


MAKERS: Mapping[str, Callable[[Asked], Step]] = {"plain": plain, "ddp": ddp, "fsdp": fsdp, "zbfx": pipelined}


def measured(system: str, asked: Asked, pictures: Path | None) -> dict[str, Any]:
    """The fields of a row; the loss of a system that shares the batch is the mean over processes."""
    begun = perf_counter()
    step = MAKERS[system](asked)
    losses = [step() for _ in range(WARM_STEPS)]
    synchronize(asked.device)
    first_s, marks = perf_counter() - begun, Marks(asked.device)
    marks.set()
    for _ in range(TIMED_STEPS):
        step()
        marks.set()
    told = torch.stack([loss.float().reshape(()).cpu() for loss in losses])
    if system in ("ddp", "fsdp"):
        dist.all_reduce(told)
        told /= asked.ranks
    rows: list[Any] = [None] * asked.ranks
    dist.all_gather_object(rows, (median(marks.intervals_s()), peak_gib(asked.device)))
    slowest_s = max(seconds for seconds, _ in rows)
    return {
        "system": system,
        "precision": asked.precision,
        "p": asked.ranks,
        "m": asked.m,
        "step_ms": round(1e3 * slowest_s, 2),
        "peak_gib": [peak for _, peak in rows],
        "losses": told.tolist(),
        "to_fifth_step_s": round(first_s, 1),
        **(step.told(pictures) if isinstance(step, Pipelined) else {}),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="llama", choices=sorted(FAMILIES))
    parser.add_argument("--systems", nargs="+", default=["plain", "zbfx"], choices=SYSTEMS)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of all processes together")
    parser.add_argument("--schedule", default="1f1b", help="of zbfx")
    parser.add_argument("--no-overlap", action="store_true", help="zbfx runs no W beside a B")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="models of a second")
    parser.add_argument("--pictures", type=Path, help="folder for timelines of zbfx, planned and measured, as SVG")
    parser.add_argument("--out", type=Path, help="append rows, with commit, versions and hardware, as lines")
    options = parser.parse_args(arguments)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = None if ranks > 1 else dist.HashStore()
    kind = "cpu:gloo,cuda:nccl" if device.type == "cuda" and ranks <= torch.cuda.device_count() else "gloo"
    dist.init_process_group(kind, store=store, rank=rank, world_size=ranks)
    where = environment()
    for precision in options.precisions:
        for system in options.systems:
            family = (TINY if options.tiny else FAMILIES)[options.family]()
            picture = options.pictures and options.pictures / f"{options.family}_{precision}.svg"
            asked = Asked(family, precision, options.microbatches, device, options.schedule, not options.no_overlap)
            row = {**where, **measured(system, asked, picture)}
            if rank == 0:
                print({name: value for name, value in row.items() if name not in where}, flush=True)
                if options.out:
                    append_row(options.out, row)
            torch.compiler.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
