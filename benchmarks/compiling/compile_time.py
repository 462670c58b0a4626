"""Seconds and peak memory that compiling takes, for the paper's four models and for two Llamas of the transformers
library, on the meta device.

    python benchmarks/compiling/compile_time.py --out compile_time.jsonl
    python benchmarks/compiling/compile_time.py --configs llama-16 llama-80 28.3B --schedules auto

Each case runs in a process of its own, on one core. A row holds the seconds of every step of `zbfx.compile`, the
total, the processor time (equal to it on an idle core), and the largest resident memory of the process, of which
`import_gib` is taken before anything is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
import zbfx.candidate
import zbfx.compiled
import zbfx.pipeline
from benchmarks.gpt import CONFIGS, GPT, next_token_loss
from benchmarks.report import append_row, environment


@dataclass(frozen=True)
class Case:
    """A model of the paper's table 3 as the paper cuts it, with the least microbatches that it runs (table 5), or a
    Llama of 2048 tokens: of 1.24B and 70B parameters."""

    config: str
    stages: int
    microbatch_size: int
    microbatches: int

    def problem(self) -> tuple[nn.Module, dict[str, Any]]:
        """The model in bfloat16, and what `compile` is given beside it."""
        if self.config in LLAMAS:
            from transformers import LlamaConfig, LlamaForCausalLM

            llama = LlamaForCausalLM(
                LlamaConfig(**LLAMAS[self.config], vocab_size=128256, num_key_value_heads=8, use_cache=False)
            )
            ids = torch.empty(self.microbatch_size, 2048, dtype=torch.long)
            return llama.bfloat16(), {"example_kwargs": {"input_ids": ids, "labels": ids}}
        config = CONFIGS[self.config]
        ids = torch.empty(self.microbatch_size, config.sequence, dtype=torch.long)
        given = {"example_inputs": (ids,), "example_targets": ids, "loss_fn": next_token_loss}
        return GPT(config).bfloat16(), given


LLAMAS: dict[str, dict[str, Any]] = {
    "llama-16": {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32},
    "llama-80": {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}
CASES = {
    case.config: case
    for case in (
        Case("1.5B", 8, 6, 24),
        Case("6.2B", 8, 3, 24),
        Case("14.6B", 16, 1, 48),
        Case("28.3B", 32, 1, 96),
        Case("llama-16", 2, 2, 16),
        Case("llama-80", 16, 1, 64),
    )
}
# Column -> where `compile` finds the function that takes the step.
STEPS = {
    "trace": (zbfx.pipeline, "trace"),
    "canonicalize": (zbfx.pipeline, "canonical"),
    "partition": (zbfx.candidate, "partition"),
    "split": (zbfx.candidate, "divided"),
    "extract": (zbfx.candidate, "extracted"),
    "cost": (zbfx.candidate, "cost_table"),
    "plan": (zbfx.candidate, "plan"),
    "codegen": (zbfx.compiled, "generate"),
    "memory": (zbfx.candidate, "predict"),
}


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Meanwhile, the steps of `zbfx.compile` add their seconds to the result."""
    seconds = dict.fromkeys(STEPS, 0.0)

    def timed(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[step] += perf_counter() - begun

        return run

    with ExitStack() as stack:
        for step, (owner, name) in STEPS.items():
            stack.enter_context(patch.object(owner, name, timed(step, getattr(owner, name))))
        yield seconds


def peak_gib() -> float:
    """The largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def compile_case(case: Case, schedule: str, share_layers: bool) -> dict[str, Any]:
    """Compile one model in this process; the figures of its row."""
    torch.set_num_threads(1)
    import_gib = peak_gib()
    with torch.device("meta"):
        model, given = case.problem()
    with stopwatch() as seconds:
        begun, begun_cpu = perf_counter(), process_time()
        pipe = zbfx.compile(
            model,
            stages=case.stages,
            microbatches=case.microbatches,
            schedule=schedule,
            device="cpu",
            share_layers=share_layers,
            **given,
        )
        total_s, cpu_s = perf_counter() - begun, process_time() - begun_cpu
    return {
        **{name: getattr(case, name) for name in ("config", "stages", "microbatch_size", "microbatches")},
        "schedule": schedule,
        "share_layers": share_layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "nodes": len(pipe.compiled.joint.graph.nodes),
        "seconds": {step: round(step_s, 3) for step, step_s in seconds.items()},
        "total_s": round(total_s, 3),
        "cpu_s": round(cpu_s, 3),
        "peak_gib": round(peak_gib(), 3),
        "import_gib": round(import_gib, 3),
        "bubble_rate": round(pipe.schedule.bubble_rate, 5),
        "gap": round(pipe.schedule.gap, 5),
    }


def run_apart(case: Case, schedule: str, share_layers: bool, core: int | None) -> dict[str, Any]:
    """The row of one case, from a process of its own."""
    command = [sys.executable, __file__, "--configs", case.config, "--schedules", schedule, "--here"]
    command += [] if share_layers else ["--each-layer"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    pin = None if core is None else (lambda: os.sched_setaffinity(0, {core}))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=one_thread, preexec_fn=pin, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line a case; seconds and GiB."""
    shown = Table("model", "stages", "schedule", *STEPS, "total s", "cpu s", "peak GiB")
    for row in rows:
        steps = [f"{step_s:.2f}" for step_s in row["seconds"].values()]
        total = [f"{row[key]:.2f}" for key in ("total_s", "cpu_s", "peak_gib")]
        shown.add_row(row["config"], str(row["stages"]), row["schedule"], *steps, *total)
    return shown


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--schedules", nargs="+", default=["zb-h1", "auto"])
    parser.add_argument("--core", type=int, help="the core to run on (default: the first that this process may use)")
    parser.add_argument("--out", type=Path, help="append the rows, one JSON object a line")
    parser.add_argument("--each-layer", action="store_true", help="compile with share_layers=False")
    parser.add_argument("--here", action="store_true", help="compile in this process, print the row as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    cases = [(CASES[config], schedule) for schedule in options.schedules for config in options.configs]
    if options.here:
        for case, schedule in cases:
            print(json.dumps(compile_case(case, schedule, not options.each_layer)))
        return
    where, core = environment(), options.core
    if core is None and hasattr(os, "sched_getaffinity"):
        core = min(os.sched_getaffinity(0))
    rows = []
    for case, schedule in cases:
        rows.append(run_apart(case, schedule, not options.each_layer, core) | where)
        if options.out:
            append_row(options.out, rows[-1])
    Console(width=160).print(table(rows))


if __name__ == "__main__":
    main()
