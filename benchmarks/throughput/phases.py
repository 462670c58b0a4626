"""The phases of two stages beside torch.compile's forward and backward of the same model.

    python -m benchmarks.throughput.phases --families llama qwen3 vit --out phases.jsonl
    python -m benchmarks.throughput.phases --tiny --device cpu

For each family, precision and level of recomputation: seconds of F, B and W of both stages (a prologue, P, runs once a
step and is told beside them), compiled, on made-up values, with weights and gradients in memory, beside forward and
backward of the whole model as a training script compiles it (blocks and loss), gradients accumulated, and of the layers
of each stage in it. On a GPU the phases are captured graphs and run in turn under load, and the whole model is
launched. One JSON object a line; on a GPU with the kernels that take longest.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import zbfx
from benchmarks.measure import Marks, synchronize
from benchmarks.report import append_row, environment
from benchmarks.throughput.families import FAMILIES, TINY, Family
from zbfx.costs.clock import sustained_s
from zbfx.costs.measure import Conditions, prepared

Call = Callable[[], Any]
PRECISIONS = ("bf16", "autocast")
LEVELS = ("none", "cheap")
WARM_S = 3.0
TIMED = 10
KERNELS = 25


def mode(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Float32 parameters compute in bfloat16 where a user asks for it; bfloat16 parameters need nothing."""
    if precision == "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def plain_call(family: Family, model: nn.Module, precision: str, device: torch.device) -> Call:
    """Forward and backward of one microbatch, compiled block by block; gradients add to `.grad`."""
    batch = typed(family.batch(family.rows, device), precision)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def call() -> None:
        with mode(precision, device):
            loss = model(**batch).loss
        loss.backward()

    return call


def typed(batch: Mapping[str, torch.Tensor], precision: str) -> dict[str, torch.Tensor]:
    wanted = torch.bfloat16 if precision == "bf16" else torch.float32
    return {name: value.to(wanted) if value.is_floating_point() else value for name, value in batch.items()}


def phase_calls(family: Family, model: nn.Module, precision: str, level: str, device: torch.device) -> dict[str, Call]:
    """The compiled phases of two stages, by stage and kind."""
    with mode(precision, device):
        pipe = zbfx.compile(
            model,
            stages=2,
            microbatches=2,
            cuts=[family.cut],
            example_kwargs=typed(family.batch(family.rows, device), precision),
            schedule="1f1b",
            recompute=level,
            backend="inductor",
            device=device,
            check=False,
        )
    conditions = Conditions(device, pipe.compiler, overlap=False, warm_s=WARM_S)
    calls: dict[str, Call] = {}
    for stage in pipe.stages:
        ready = prepared(stage, conditions)
        assert not ready.refused, ready.refused
        calls |= {f"{level} {stage.index} {kind}": call for kind, call in ready.calls.items()}
    return calls


def launched_s(family: Family, model: nn.Module, call: Call, device: torch.device) -> tuple[float, float]:
    """Median seconds that forward and backward of the layers of each stage take, among others under load.

    Models of the transformers library look at values of masks, and so no graph can hold them: they are launched one by
    one, which such sizes do not feel.
    """
    call()  # compiles
    marks, ends = Marks(device), perf_counter() + WARM_S
    while perf_counter() < ends:
        call()
        synchronize(device)

    def at_the_cut(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        marks.set()
        inputs[0].register_hook(lambda _: marks.set())

    with closing_hook(model.get_submodule(family.cut).register_forward_pre_hook(at_the_cut)):
        for _ in range(1 + TIMED):
            marks.set()
            call()
            marks.set()
    # Marks of a call: its begin, the cut in the forward, the cut in the backward, its end.
    intervals = [*marks.intervals_s(), 0.0]
    whole = list(zip(*[iter(intervals)] * 4, strict=True))
    return median(forward + backward for forward, _, backward, _ in whole[1:]), median(row[1] for row in whole[1:])


@contextmanager
def closing_hook(handle: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def kernels(call: Call) -> dict[str, float]:
    """Microseconds on the GPU of the kernels of a call that take longest, by name."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    total: Counter[str] = Counter()
    for event in profiler.events():
        total[event.name[:90]] += event.device_time_total
    return {name: round(us, 1) for name, us in total.most_common(KERNELS)}


def rows(
    family: str, made: Family, precision: str, levels: Sequence[str], device: torch.device
) -> Iterator[dict[str, Any]]:
    """One row for each level."""
    begun = perf_counter()
    torch.manual_seed(0)
    with torch.device(device):
        model = made.build().train()
    model = model.to(torch.bfloat16 if precision == "bf16" else torch.float32)
    calls: dict[str, Call] = {}
    for level in levels:
        calls |= phase_calls(made, model, precision, level, device)
        print(family, precision, level, round(perf_counter() - begun, 1), file=sys.stderr, flush=True)
    made.compiled(model)
    plain = plain_call(made, model, precision, device)
    seconds = sustained_s([calls], device, WARM_S)[0]
    plain_s = launched_s(made, model, plain, device)
    calls["plain"] = plain
    told = {name: kernels(call) for name, call in calls.items()} if device.type == "cuda" else {}
    for level in levels:
        phases = {name: value for name, value in seconds.items() if name.startswith(level)}
        stage_s = [sum(phases[f"{level} {index} {kind}"] for kind in "FBW") for index in range(2)]
        yield {
            "family": family,
            "precision": precision,
            "recompute": level,
            "plain_ms": [round(1e3 * value, 3) for value in plain_s],
            "stage_ms": [round(1e3 * value, 3) for value in stage_s],
            "ratios": [round(mine / theirs, 4) for mine, theirs in zip(stage_s, plain_s, strict=True)],
            "phase_ms": {name: round(1e3 * value, 3) for name, value in phases.items()},
            "kernels_us": {name: found for name, found in told.items() if name in {*phases, "plain"}},
            "took_s": round(perf_counter() - begun, 1),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["llama"], choices=sorted(FAMILIES))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=("none", "cheap", "full"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of a second")
    parser.add_argument("--out", type=Path, help="append rows, with commit, versions and hardware, as lines")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    where = environment()
    for precision in options.precisions:
        for family in options.families:
            for row in rows(family, (TINY if options.tiny else FAMILIES)[family](), precision, options.levels, device):
                print({name: value for name, value in row.items() if name != "kernels_us"}, flush=True)
                if options.out:
                    append_row(options.out, {**where, **row})
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
