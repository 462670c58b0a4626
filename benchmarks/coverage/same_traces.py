"""Whether the graph of a model is the same, node by node, with layers traced once and with each traced by itself.

    python benchmarks/coverage/same_traces.py --count 1000 --seed 0
    python benchmarks/coverage/same_traces.py --zoo [--only llama bert]

Random models: stacks of layers that look alike (`stacked_models.py`), and at times one of `fuzz_wide.py`. With `--zoo`:
the architectures of `model_zoo.py`. Prints one JSON object: how many graphs are equal, in how many of these layers were
traced once, how many models are refused (in both ways), why layers were not traced once, and what is wrong. `--seed N
--count 1` repeats model N. A campaign that is cut off (SIGTERM) prints the object for the models that are done.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.coverage.fuzz_wide import PROGRESS, Ended, begin
from benchmarks.coverage.random_models import DOUBLE, WIDTH
from benchmarks.coverage.stacked_models import LENGTH, ROWS, Stacked
from benchmarks.coverage.wide_models import WideModel, dims_of, draw, loss_of, microbatches_of
from benchmarks.coverage.zoo_cases import CASES, Case, batch_of, model_of
from benchmarks.report import append_row, environment
from tests.support.traces import stamped, told
from zbfx.trace.tracer import trace

WIDE = 0.15  # of the random models

Made = tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any], tuple[Any, ...], Any]  # as `trace` takes them


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def random_model(seed: int) -> Made:
    random = Random(seed)
    if random.random() < WIDE:
        wide = draw(random)
        args, kwargs = microbatches_of(wide, 0)[0].call(wide.recipe)
        return WideModel(wide.recipe), loss_of(wide.recipe), args[:2], kwargs, args[2:], dims_of(wide.recipe)
    model = Stacked(random)
    return model, mean_square, (torch.randn(ROWS, LENGTH, WIDTH, dtype=DOUBLE),), {}, (), None


def model_of_zoo(case: Case) -> Made:
    """A model without a cache of keys and values: layers that append to one are traced each by itself."""
    torch.manual_seed(0)
    model = model_of(case)
    for part in model.modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
    return model, None, (), batch_of(case, model, seed=0), (), None


@dataclass(frozen=True)
class Traced:
    """What a trace has found: a graph as a value, or why there is none."""

    graph: list[Any] | None = None
    error: str = ""
    layers: int = 0
    notes: tuple[str, ...] = ()


def traced(made: Callable[[], Made], share_layers: bool) -> Traced:
    """The trace of a model, which is made anew."""
    model, loss_fn, args, kwargs, targets, dims = made()
    try:
        joint, _ = trace(
            model,
            loss_fn,
            args,
            kwargs,
            targets,
            device=torch.device("cpu"),
            batch_dims=dims,
            share_layers=share_layers,
        )
    except Exception as error:
        return Traced(error=f"{type(error).__name__}: {error}")
    return Traced(told(joint), layers=stamped(joint), notes=joint.notes)


@dataclass
class Tally:
    """What has become of the models so far."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    apart: Counter[str] = field(default_factory=Counter)  # why layers were traced each by itself
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, made: Callable[[], Made]) -> None:
        """Trace a model in both ways."""
        once, each = traced(made, True), traced(made, False)
        self.counts["models"] += 1
        if once.graph is None and each.graph is None:
            self.counts["refused"] += 1
            self.refusals[re.sub(r"\d+|at .*", "", each.error)[:80]] += 1
        elif once.graph != each.graph:
            self.counts["wrong"] += 1
            self.failures[name] = difference(once, each)[:1500]
            print(name, self.failures[name], file=sys.stderr, flush=True)
        else:
            self.counts["equal"] += 1
            self.counts["shared"] += once.layers > 0
            self.counts["layers_shared"] += once.layers
            self.apart.update({re.sub(r"^.*? \((.*)\)$", r"\1", note): 1 for note in once.notes if "by itself" in note})

    def summary(self) -> dict[str, Any]:
        kinds = ("models", "equal", "shared", "layers_shared", "refused", "wrong")
        apart, refusals = dict(self.apart.most_common()), dict(self.refusals.most_common(12))
        counts = {kind: self.counts[kind] for kind in kinds}
        return {**counts, "apart": apart, "refusals": refusals, "failures": self.failures}


def difference(once: Traced, each: Traced) -> str:
    """The first nodes that differ, or the error of one of both."""
    if once.graph is None or each.graph is None:
        return f"traced once: {once.error or 'a graph'}; each by itself: {each.error or 'a graph'}"
    pairs = [(a, b) for a, b in zip(once.graph, each.graph, strict=False) if a != b]
    lengths = f"{len(once.graph)} and {len(each.graph)} entries, {once.layers} layers traced once"
    return f"{lengths}; first differing: {pairs[0]}" if pairs else lengths


def campaign(models: Iterator[tuple[str, Callable[[], Made]]]) -> dict[str, Any]:
    """Trace models in both ways; the summary, of those that are done where the process is asked to end (SIGTERM)."""
    begun, begun_cpu, tally = perf_counter(), process_time(), Tally()
    with suppress(Ended):
        for done, (name, made) in enumerate(models, 1):
            tally.add(name, made)
            if done % PROGRESS == 0:
                print(json.dumps({"done": done, **tally.counts}), file=sys.stderr, flush=True)
    took = {"seconds": round(perf_counter() - begun, 1), "cpu_s": round(process_time() - begun_cpu, 1)}
    return {**tally.summary(), **took}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="of random models")
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the others follow")
    parser.add_argument("--zoo", action="store_true", help="the architectures of model_zoo.py, and no random models")
    parser.add_argument("--only", nargs="+", default=[""], help="of the zoo: names that contain one of these")
    parser.add_argument("--out", type=Path, help="append the JSON object, with commit and versions, as one line")
    options = parser.parse_args(arguments)
    begin()
    logging.disable(logging.WARNING)
    seeds = range(options.seed, options.seed + options.count)
    models: Iterator[tuple[str, Callable[[], Made]]] = ((str(n), partial(random_model, n)) for n in seeds)
    if options.zoo:
        cases = [case for case in CASES if any(part in case.architecture for part in options.only)]
        models = ((case.architecture, partial(model_of_zoo, case)) for case in cases)
    row = {**environment(), "seed": options.seed, "zoo": options.zoo, **campaign(models)}
    if options.out:
        append_row(options.out, row)
    print(json.dumps(row, indent=1))
    return 1 if row["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
