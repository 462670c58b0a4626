"""One job of `same_bits.py` under whichever zbfx is imported: models, each compiled and run in several ways.

    python -m benchmarks.coverage.bits_runs FOLDER [--only NAME] [--schedule NAME]

Writes a file `MODEL/RUN.pt` into the folder for each run: tensors by what they are, or the error that ended the run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import spawn

import zbfx
from benchmarks.coverage.bits_models import Problem
from benchmarks.coverage.bits_problems import MODELS, problem
from zbfx import CostTable, StageCost
from zbfx.optim import PostValidated

STAGES, MICROBATCHES, ROWS = 4, 5, 2  # in all; in a batch; of a microbatch
REPLICAS, RANKS = 2, 2  # of runs over processes
LIMIT_S = 120  # for a message between processes

Results = dict[str, Tensor]
Run = Callable[[str], Results]  # of the model of this name

# A search for stages that are all alike proves its order optimal, and so ends with the same one on every machine.
ALIKE = CostTable.chain([StageCost(1, 1, 1)] * STAGES, placement=(0, 1, 1, 0))
# Ws in descending order, after an early one and a fused backward.
ORDER = ("F0", "F1", "F2", "F3", "F4", "B0", "B1", "W1", "BW2", "B3", "B4", "W4", "W3", "W0")
ORDERS = [" ".join(f"{action[:-1]}{stage}.{action[-1]}" for action in ORDER) for stage in range(STAGES)]


def compiled(made: Problem, **options: Any) -> zbfx.Pipeline:
    """A pipeline of four stages, on four ranks unless the options name fewer."""
    inputs, targets, kwargs = made.first(ROWS)
    asked = {"stages": STAGES, "microbatches": MICROBATCHES, "schedule": "zb-h1", **made.options, **options}
    with torch.autocast("cpu", torch.bfloat16) if made.autocast else nullcontext():
        return zbfx.compile(
            made.model,
            loss_fn=made.loss_fn,
            example_inputs=inputs,
            example_targets=targets,
            example_kwargs=kwargs,
            check=False,
            **asked,
        )


def copies(kind: str, named: Iterator[tuple[str, Tensor | None]]) -> Results:
    return {f"{kind} {name}": t.detach().clone() for name, t in named if t is not None}


def gradients(step: Any, kind: str = "gradient") -> Results:
    return copies(kind, ((name, p.grad) for name, p in step.named_parameters()))


def state(made: Problem) -> Results:
    """All parameters and buffers of the model and its loss, those too that no stage has."""
    modules = [m for m in (made.model, made.loss_fn) if isinstance(m, torch.nn.Module)]
    parameters = chain.from_iterable(m.named_parameters() for m in modules)
    return copies("parameter", parameters) | copies("buffer", chain.from_iterable(m.named_buffers() for m in modules))


def trained(made: Problem, step: Any) -> Results:
    """Two steps of AdamW, the second on gradients that add to those of the first, and an evaluation."""
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-2)
    found: Results = {}
    for count in range(2):
        args, kwargs = made.batch(roll=count)
        found[f"loss {count}"] = step(*args, **kwargs).detach().clone()
        found |= gradients(step, f"gradient {count}")
        optimizer.step()
    args, kwargs = made.batch(roll=0)
    return found | state(made) | {"evaluation": step.evaluate(*args, **kwargs).detach().clone()}


def in_turn(**options: Any) -> Run:
    """All ranks in this process."""

    def run(name: str) -> Results:
        made = problem(name, ROWS * MICROBATCHES)
        return trained(made, compiled(made, **options).run_local(seed=0))

    return run


def replicated(name: str) -> Results:
    """One of several replicas, alone: Ws run bucket by bucket."""
    made = problem(name, ROWS * MICROBATCHES)
    return trained(made, compiled(made).replicated(REPLICAS).run_local(seed=0))


def planned_before(name: str) -> Results:
    """The schedule of another pipeline of the model, given as a `Schedule`."""
    made = problem(name, ROWS * MICROBATCHES)
    return trained(made, compiled(made, schedule=compiled(made, schedule="zb-h2").schedule).run_local(seed=0))


def within_bytes(name: str) -> Results:
    """A limit in bytes between what full recomputation holds and what none does."""
    made = problem(name, ROWS * MICROBATCHES)
    least, most = (max(m.peak_bytes for m in compiled(made, recompute=level).memory) for level in ("full", "none"))
    return trained(made, compiled(made, mem_limit=int(least + most) // 2).run_local(seed=0))


def post_validated(**options: Any) -> Run:
    """Four steps of AdamW that clip, and so roll back and repeat forwards."""

    def run(name: str) -> Results:
        made = problem(name, ROWS * MICROBATCHES)
        step = compiled(made).run_local(seed=0)
        optimizer = PostValidated(torch.optim.AdamW(step.parameters(), lr=1e-2), step, max_norm=0.05, **options)
        found: Results = {}
        for count in range(4):
            args, kwargs = made.batch(roll=count)
            found[f"loss {count}"] = step(*args, **kwargs).detach().clone()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.settle()
        counts = optimizer.counts
        found["counts"] = torch.tensor([counts.steps, counts.clipped, counts.skipped, counts.rolled_back])
        return found | state(made)

    return run


def dropped(name: str) -> Results:
    """A step that is not finite leaves gradients as they were."""
    made = problem(name, ROWS * MICROBATCHES)
    step = compiled(made).run_local(seed=0, on_nonfinite="drop")
    args, kwargs = made.batch(roll=0)
    step(*args, **kwargs)
    found = gradients(step)
    spoilt = [torch.full_like(t, float("nan")) if t.is_floating_point() else t for t in args]
    found["loss"] = step(*spoilt, **kwargs).detach().clone()
    assert step.verdict is not None, "nan is not finite"
    return found | gradients(step, "gradient after") | state(made)


def new_shapes(how: str) -> Run:
    """Training and evaluation on batches of three other sizes, and of the first again."""

    def run(name: str) -> Results:
        made = problem(name, ROWS * MICROBATCHES)
        step = compiled(made).run_local(seed=0, on_new_shape=how)
        found: Results = {}
        for rows in (3, 5, ROWS, 4):
            args, kwargs = problem(name, rows * MICROBATCHES).batch(roll=0)
            found[f"loss of {rows}"] = step(*args, **kwargs).detach().clone()
            found |= gradients(step, f"gradient of {rows}")
            found[f"evaluation of {rows}"] = step.evaluate(*args, **kwargs).detach().clone()
        return found | state(made)

    return run


@dataclass(frozen=True)
class Processes:
    """Replicas of a pipeline as processes over gloo; one replica is bound without a mesh.

    `validated` says whether the optimizer clips, and so rolls back, without a barrier.
    """

    replicas: int = 2
    ranks: int = 2
    validated: bool = False
    compile: Mapping[str, Any] = field(default_factory=dict)
    bind: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, name: str) -> Results:
        """Every process's own tensors."""
        count = self.replicas * self.ranks
        with tempfile.TemporaryDirectory() as folder:
            spawn(self.one, (name, folder), nprocs=count)
            found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(count)]
        return {f"process {rank} {what}": t for rank, results in enumerate(found) for what, t in results.items()}

    def one(self, rank: int, name: str, folder: str) -> None:
        """One process."""
        quiet()
        world: dict[str, Any] = {
            "rank": rank,
            "world_size": self.replicas * self.ranks,
            "timeout": timedelta(seconds=LIMIT_S),
        }
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", **world)
        shape, dimensions = (self.replicas, self.ranks), ("dp", "pp")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=dimensions) if self.replicas > 1 else None
        made = problem(name, ROWS * MICROBATCHES)
        pipe = compiled(made, stages=self.ranks, **self.compile)
        step = pipe.bind(mesh, seed=0, timeout_s=float(LIMIT_S), **self.bind)
        torch.save(self.trained(made, step, rank // self.ranks), Path(folder) / f"{rank}.pt")
        step.close()
        dist.destroy_process_group()

    def trained(self, made: Problem, step: Any, replica: int) -> Results:
        """Three steps of AdamW, and an evaluation."""
        plain = torch.optim.AdamW(step.parameters(), lr=1e-2)
        optimizer = PostValidated(plain, step, max_norm=0.05) if self.validated else plain
        found: Results = {}
        for count in range(3):
            optimizer.zero_grad()
            args, kwargs = made.batch(roll=count + 3 * replica)
            found[f"loss {count}"] = step(*args, **kwargs).detach().clone()
            optimizer.step()
        if isinstance(optimizer, PostValidated):
            optimizer.settle()
        step.collect()
        found |= gradients(step) | copies("parameter", step.named_parameters()) | copies("buffer", step.named_buffers())
        return found | {"evaluation": step.evaluate(*args, **kwargs).detach().clone()}


# What every model runs, and what only these do.
SCHEDULES: Mapping[str, Run] = {
    "gpipe": in_turn(schedule="gpipe"),
    "1f1b": in_turn(schedule="1f1b"),
    "zb-h1": in_turn(schedule="zb-h1"),
    "zb-h2": in_turn(schedule="zb-h2"),
    "interleaved-1f1b": in_turn(schedule="interleaved-1f1b", stages=2),
    "zb-v": in_turn(schedule="zb-v", stages=2, costs=ALIKE),
    "order": in_turn(schedule=ORDERS),
}
OTHERS: Mapping[str, tuple[Run, tuple[str, ...]]] = {
    "a Schedule": (planned_before, ("mlp", "gpt")),
    "replicated": (replicated, ("mlp", "tied", "batch-norm", "frozen")),
    "recompute cheap": (in_turn(recompute="cheap"), ("gpt", "conv-batch-norm")),
    "recompute full": (in_turn(recompute="full"), ("tied-dropout", "llama", "several-outputs")),
    "within bytes": (within_bytes, ("gpt", "skips", "side-losses", "bert")),
    "optimizer": (post_validated(), ("mlp", "tied", "mixed-dtypes", "side-losses", "batch-norm")),
    "optimizer, sync": (post_validated(sync=True), ("tied",)),
    "optimizer, arithmetic": (post_validated(rollback="arithmetic"), ("mlp",)),
    "on_nonfinite": (dropped, ("mlp", "conv-group-norm")),
    "recompile": (new_shapes("recompile"), ("mlp", "gpt", "batch-norm")),
    "symbolic": (new_shapes("symbolic"), ("mlp", "gpt", "skips")),
    "processes": (Processes(), ("tied-dropout", "batch-norm")),
    "processes, optimizer": (Processes(validated=True), ("shared-module",)),
    "processes, zero": (Processes(validated=True, bind={"zero": 1}), ("gpt",)),
    "processes, inductor": (Processes(replicas=1, compile={"backend": "inductor"}), ("mlp", "tied", "conv-group-norm")),
}


def runs_of(model: str) -> dict[str, Run]:
    return {**SCHEDULES, **{name: run for name, (run, models) in OTHERS.items() if model in models}}


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=MODELS, help="the model to run")
    parser.add_argument("--schedule", choices=(*SCHEDULES, *OTHERS), help="how to run it")
    options = parser.parse_args()
    quiet()
    for model in [options.only] if options.only else MODELS:
        (options.folder / model).mkdir()
        for name, run in runs_of(model).items():
            if options.schedule not in (None, name):
                continue
            start = perf_counter()
            try:
                found: Results | str = run(model)
            except Exception:
                found = traceback.format_exc()
            torch.save(found, options.folder / model / f"{name}.pt")
            wrong = "" if isinstance(found, dict) else found
            print(f"{model}, {name}: {perf_counter() - start:.1f} s {wrong}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
