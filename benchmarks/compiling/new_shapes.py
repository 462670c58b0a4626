"""A batch of another shape: seconds to trace it anew, and to put its sizes into one trace with symbols.

    python benchmarks/compiling/new_shapes.py

One JSON row per architecture of the transformers library, small (`benchmarks/coverage/zoo_cases.py`), cut into four
stages: seconds to compile, for the first further shape with symbols, and medians over further shapes of substitution
and of a trace of each; whether graphs and orders are the same. `reason`: why a shape was traced by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
from torch import Tensor, fx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import zbfx
from benchmarks.coverage import zoo_cases
from benchmarks.rows import git_commit
from zbfx.compiled import Compiled
from zbfx.graphs import Phase

NAMES = ("gpt2", "llama", "bert", "t5", "mixtral", "vit", "mamba")
SHAPES = ((4, 12), (4, 9), (3, 16), (6, 11), (5, 14))  # rows of a microbatch, and length; the example's are (2, 8)
MICROBATCHES = 2


def batch(case: zoo_cases.Case, model: torch.nn.Module, rows: int, length: int) -> dict[str, Any]:
    """A full batch, its microbatches end to end."""
    zoo_cases.ROWS, zoo_cases.LENGTH = rows, length
    parts = [zoo_cases.batch_of(case, model, seed=k) for k in range(MICROBATCHES)]
    return {
        name: torch.cat([part[name] for part in parts]) if isinstance(value, Tensor) else value
        for name, value in parts[0].items()
    }


def structure(phase: Phase) -> list[tuple[str, str]]:
    """The nodes of a phase by their place in it."""
    place = {node: f"%{k}" for k, node in enumerate(phase.module.graph.nodes)}
    return [
        ("" if node.op == "placeholder" else str(node.target), str(fx.map_arg((node.args, node.kwargs), place.get)))
        for node in place
        if node.op != "placeholder"
    ]


def same(one: Compiled, other: Compiled) -> bool:
    pairs = zip(one.stages, other.stages, strict=True)
    graphs = all(structure(a.phases[kind]) == structure(b.phases[kind]) for a, b in pairs for kind in a.phases)
    return graphs and one.schedule.ranks == other.schedule.ranks


def row(name: str) -> dict[str, Any]:
    case = next(case for case in zoo_cases.CASES if case.architecture == name)
    torch.manual_seed(0)
    model = zoo_cases.model_of(case)
    zoo_cases.ROWS, zoo_cases.LENGTH = 2, 8
    example = zoo_cases.batch_of(case, model, seed=0)
    begun = perf_counter()
    pipe = zbfx.compile(
        model, stages=4, microbatches=MICROBATCHES, example_kwargs=example, schedule="zb-h1", device="cpu", check=False
    )
    seconds: dict[str, list[float]] = {"compile": [perf_counter() - begun]}
    steps = {option: pipe.run_local(on_new_shape=option) for option in ("symbolic", "recompile")}
    equal, reasons = [], set()
    for shape in SHAPES:
        full = batch(case, model, *shape)
        found = {}
        for option, step in steps.items():
            begun = perf_counter()
            found[option] = step.worker.engines.engine_for((), full, MICROBATCHES, step.worker.engines.requests[0]).pipe
            seconds.setdefault(option, []).append(perf_counter() - begun)
        equal.append(same(found["symbolic"], found["recompile"]))
        reasons |= {note for note in found["symbolic"].schedule.notes if note.startswith("traced for")}
    return {
        "architecture": name,
        "nodes": len(pipe.compiled.joint.graph.nodes),
        "compile_s": seconds["compile"][0],
        "first_s": seconds["symbolic"][0],
        "substitute_s": median(seconds["symbolic"][1:]),
        "recompile_s": median(seconds["recompile"]),
        "same": all(equal),
        "reason": min(reasons, default=None),
        "commit": git_commit(),
        "torch": torch.__version__,
        "device": "CPU",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these architectures alone")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in options.only:
        print(json.dumps(row(name)), flush=True)


if __name__ == "__main__":
    main()
