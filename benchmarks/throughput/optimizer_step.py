"""Step time with a barrier in the optimizer, without one, and with a wrong step every so often: planned and measured.

    torchrun --nproc-per-node=4 -- benchmarks/throughput/optimizer_step.py --config 1.5B --b 4 --m 16 \\
        --schedules zb-h2,zb-1p \\
        --backends cudagraph,eager --budget-s 900 --out optimizer_step.jsonl

on GPUs (2 to 4; also `--config 350M --b 2`), and on CPUs over gloo with `--config tiny --b 2 --m 8`. Each case trains
for `--repeats` steps without a pause between them, `--rounds` times, and gives one JSON line:

    plain      the optimizer alone: neither clips nor checks
    barrier    PostValidated(sync=True): all ranks wait for the norm, as after an all-reduce
    validated  PostValidated: nobody waits; no step is wrong
    repeat@k   the same, with every k-th step wrong on every rank: rolled back, taken again, forwards repeated

`planned_ms` is the plan's time of a step among others of its kind (`PostValidated.plan`). The loss of `plain` and
`barrier` is broadcast at the end of each step, which waits too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks import rows
from benchmarks.gpt import GPT, next_token_loss
from benchmarks.measure import barrier, peak_gib, reset_peak, synchronize
from benchmarks.place import Place
from benchmarks.stages import CONFIGS, batch, fill
from benchmarks.throughput.cases import Case
from benchmarks.throughput.compare import describe, run_flags, words
from benchmarks.throughput.ours import choices, materialize, own_parameters
from benchmarks.world import World, time_limit
from zbfx.optim import PostValidated
from zbfx.optim.state import Act, Counts, Layout, Rules, Verdict


@dataclass(frozen=True)
class Row:
    """One case. Times in milliseconds: of a step in the median round and in the slowest; `undo_gib` by rank."""

    mode: str
    config: str
    b: int
    m: int
    schedule: str
    backend: str
    rollback: str
    p: int
    step_ms: float | None = None
    slowest_ms: float | None = None
    tokens_per_s: float | None = None
    planned_ms: float | None = None
    undo_gib: list[float] | None = None
    peak_gib: list[float | None] | None = None
    loss: float | None = None
    counts: dict[str, int] | None = None
    error: str | None = None
    commit: str = ""
    device: str = ""
    dtype: str = ""
    torch: str = ""
    nccl: str | None = None


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--config", choices=list(CONFIGS), default="350M")
    flags.add_argument("--b", type=int, default=2, help="sequences in a microbatch")
    flags.add_argument("--m", type=int, default=16, help="microbatches")
    flags.add_argument("--schedules", type=words, default=["zb-h2"], help="name[@memory limit]")
    flags.add_argument("--backends", type=words, default=["eager"])
    flags.add_argument("--modes", type=words, default=["plain", "barrier", "validated", "repeat@10", "repeat@2"])
    flags.add_argument("--rollback", choices=["exact", "arithmetic"], default="exact")
    flags.add_argument("--costs", default="measure", help="what zbfx plans from: measure or estimate")
    flags.add_argument("--warmup", type=int, default=4)
    flags.add_argument("--repeats", type=int, default=20, help="steps a round")
    flags.add_argument("--rounds", type=int, default=3)
    run_flags(flags, "optimizer_step.jsonl")
    return flags


@dataclass(frozen=True)
class WrongEvery(Rules):
    """Rules under which every k-th verdict says that a step must be taken again, multiplied by a half."""

    is_wrong: Callable[[], bool] = lambda: False

    def judge(self, layout: Layout, state: Sequence[float]) -> Verdict:
        verdict = super().judge(layout, state)
        return replace(verdict, factor=0.5) if self.is_wrong() else verdict


def is_every(k: int, counts: Counts) -> bool:
    return counts.steps % k == k - 1


class Hasty(PostValidated):
    """Every rank steps early, whatever it knows."""

    def early_act(self, rank: int, partial: Verdict) -> Act:
        return Act.STEPPED


class Training:
    """A bound pipeline and its optimizer, in one of the modes."""

    def __init__(self, mode: str, pipe: zbfx.Pipeline, place: Place, case: Case, rollback: str) -> None:
        for name in own_parameters(pipe, place.rank):
            parameter = pipe.model.get_parameter(name)
            parameter.grad = None
            fill(name, parameter)
        self.step = pipe.bind(timeout_s=place.timeout_s)
        self.batch = batch(CONFIGS[case.config], case.m * case.b, place.device)
        inner = torch.optim.AdamW(self.step.parameters(), lr=1e-5, fused=True)
        self.optimizer: torch.optim.Optimizer = inner
        self.every = int(mode.partition("@")[2] or 0)
        if mode == "plain":
            return
        kind = Hasty if self.every else PostValidated
        post = kind(inner, self.step, max_norm=1e9, rollback=rollback, sync=mode == "barrier")
        self.optimizer = post
        if self.every:
            post.rules = WrongEvery(1e9, True, partial(is_every, self.every, post.counts))

    def run(self, steps: int) -> Tensor:
        for _ in range(steps):
            loss = self.step(*self.batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if isinstance(self.optimizer, PostValidated):
            self.optimizer.settle()
        return loss

    def planned_ms(self, mode: str) -> float | None:
        if not isinstance(self.optimizer, PostValidated):
            return None
        plan = self.optimizer.plan()
        seconds = plan.repeating_s(self.every) if self.every else plan.validated_s
        return 1e3 * (plan.barrier_s if mode == "barrier" else seconds)


class Benchmark:
    """All cases on this process's rank."""

    def __init__(self, options: argparse.Namespace, world: World) -> None:
        self.options, self.world, self.begun = options, world, perf_counter()
        dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        self.place = Place(world.rank, world.ranks, world.device, dtype, timeout_s=options.case_timeout_s)
        self.machine = rows.machine(self.place, options.commit)
        self.keys = map(str, range(10**6))

    def run(self) -> None:
        for schedule, backend in product(self.options.schedules, self.options.backends):
            case = Case("zbfx", self.options.config, self.options.b, self.options.m, schedule, backend, "auto")
            try:
                pipe = self.together(partial(self.compiled, case))
            except Failed as failure:
                self.write(case, "compile", error=str(failure))
                continue
            for mode in self.options.modes:
                self.measure(case, mode, pipe)
            del pipe

    def measure(self, case: Case, mode: str, pipe: zbfx.Pipeline) -> None:
        elapsed = self.world.gather(next(self.keys), perf_counter() - self.begun)[0]
        if elapsed > self.options.budget_s:
            self.write(case, mode, error=f"not run: more than {self.options.budget_s:g} s had passed")
            return
        try:
            results = self.together(partial(self.trained, case, mode, pipe))
        except Failed as failure:
            self.write(case, mode, error=str(failure))
            return
        everyone = [json.loads(text) for text in self.world.gather(next(self.keys), json.dumps(results))]
        rounds = [max(times) for times in zip(*(found["round_s"] for found in everyone), strict=True)]
        step_s = [seconds / self.options.repeats for seconds in rounds]
        self.write(
            case,
            mode,
            step_ms=1e3 * median(step_s),
            slowest_ms=1e3 * max(step_s),
            tokens_per_s=case.m * case.b * CONFIGS[case.config].sequence / median(step_s),
            peak_gib=[found["peak_gib"] for found in everyone],
            undo_gib=[found["undo_gib"] for found in everyone],
            **{key: results[key] for key in ("planned_ms", "loss", "counts")},
        )

    def compiled(self, case: Case) -> zbfx.Pipeline:
        config = CONFIGS[case.config]
        with torch.device("meta"):
            model = GPT(config).to(self.place.dtype)
        ids, targets = batch(config, case.b, self.place.device)
        with self.world.process_group(next(self.keys), self.options.case_timeout_s):
            pipe = zbfx.compile(
                model,
                stages=self.place.ranks,
                microbatches=case.m,
                example_inputs=(ids,),
                example_targets=targets,
                loss_fn=next_token_loss,
                costs=self.options.costs,
                device=self.place.device,
                **choices(case, self.place),
            )
        materialize(model, pipe, self.place)
        return pipe

    def trained(self, case: Case, mode: str, pipe: zbfx.Pipeline) -> dict[str, Any]:
        device = self.place.device
        reset_peak(device)
        with self.world.process_group(next(self.keys), self.options.case_timeout_s):
            training = Training(mode, pipe, self.place, case, self.options.rollback)
            training.run(self.options.warmup)
            seconds = []
            for _ in range(self.options.rounds):
                synchronize(device)
                barrier()
                begun = perf_counter()
                loss = training.run(self.options.repeats)
                synchronize(device)
                seconds.append(perf_counter() - begun)
            post = training.optimizer if isinstance(training.optimizer, PostValidated) else None
            results = {
                "round_s": seconds,
                "peak_gib": peak_gib(device),
                "loss": float(loss),
                "planned_ms": training.planned_ms(mode),
                "counts": asdict(post.counts) if post else None,
                "undo_gib": sum(undo.bytes for undo in post.undos.values()) / 2**30 if post else 0.0,
            }
            training.step.close()  # captured graphs go before the communicators that they use
            del training, post
            gc.collect()
        return results

    def together(self, action: Callable[[], Any]) -> Any:
        """Do something on every rank; raises `Failed` on all if it fails on one. A rank that hangs ends the run."""
        result, error = None, None
        with time_limit(self.options.case_timeout_s):
            try:
                result = action()
            except Exception as failure:
                error = f"rank {self.world.rank}: {describe(failure)}"
        errors = self.world.gather(next(self.keys), error, self.options.case_timeout_s)
        for text in errors:
            if text:
                raise Failed(text)
        return result

    def write(self, case: Case, mode: str, **results: Any) -> None:
        if self.world.rank:
            return
        fields: dict[str, Any] = {key: getattr(case, key) for key in ("config", "b", "m", "schedule", "backend")}
        fields |= {"mode": mode, "rollback": self.options.rollback, "p": self.world.ranks}
        row = Row(**fields, **results, **self.machine)
        with self.options.out.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        times = row.error or f"{row.step_ms:.2f} ms, planned {row.planned_ms or float('nan'):.2f}, {row.counts}"
        print(f"[{perf_counter() - self.begun:5.0f} s] {mode} {case.name}: {times}", file=sys.stderr, flush=True)


class Failed(Exception):
    """A case that some rank could not run; the message is the first such rank's."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    Benchmark(options, World.from_environment(options.device)).run()


if __name__ == "__main__":
    main()
