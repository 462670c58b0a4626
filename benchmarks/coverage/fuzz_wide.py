"""Random models of the kinds that go wrong in silence, each as a pipeline beside plain PyTorch.

    python benchmarks/coverage/fuzz_wide.py --count 1000 --seed 0
    python benchmarks/coverage/fuzz_wide.py --count 500 --workers 2  # over started processes that stay alive

Writes in forwards and backwards, hooks, random numbers, checkpointed parts over parameters, mixed dtypes, tied weights,
parts that torch.compile has compiled, arguments with the batch in any dimension, further shapes, and a mode of torch
around any call. Loss, gradients, buffers and the global generators are compared in every step. Prints one JSON object:
how many models agreed, how many were refused and why, and which seeds were wrong. `--seed N --count 1` repeats model N.
A campaign that is cut off (SIGTERM) prints the object for the models that are done.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from time import perf_counter, process_time
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.coverage.wide_models import draw
from benchmarks.coverage.wide_runs import SEED, TOLERANCE, Outcome, compare, precision
from benchmarks.report import append_row, environment

PROGRESS = 100  # models between two lines on stderr
TOGETHER = 25  # models of one process group
FEW_ROUNDINGS = 2 * TOLERANCE[torch.bfloat16]


def let_go(outcome: Outcome) -> Outcome:
    """After an error: torch's checkpoints take their hooks away once the error that has ended them is collected."""
    if outcome.refusal or outcome.invalid:
        gc.collect()
    return outcome


def outcome_of(seed: int, ranks: int | None = None) -> Outcome:
    """The outcome of one seed; an error that is no refusal is wrong. Half precision that is off by a few roundings is
    right if the same model is in float64."""
    try:
        wide = draw(Random(seed), ranks)
        found = compare(wide)
        if found.wrong and precision(wide) is torch.bfloat16 and found.error < FEW_ROUNDINGS:
            exact = compare(replace(wide, recipe=replace(wide.recipe, dtype=torch.float64)))
            return found if exact.wrong or exact.refusal or exact.invalid else replace(found, wrong=None)
        return found
    except Exception as error:
        cause = f" from {error.__cause__}" if error.__cause__ else ""
        return Outcome(wrong=f"{type(error).__name__}: {error}{cause}")


@dataclass
class Tally:
    """What has become of the models so far."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # that were not meant, by their first words
    seeds: dict[str, list[int]] = field(default_factory=dict)  # of the refusals
    failures: dict[int, str] = field(default_factory=dict)
    invalid: Counter[str] = field(default_factory=Counter)
    largest_error: float = 0.0

    def add(self, seed: int, outcome: Outcome) -> None:
        if outcome.invalid:
            self.counts["invalid"] += 1
            self.invalid[outcome.invalid[:60]] += 1
            return
        self.counts["models"] += 1
        if outcome.wrong:
            self.counts["wrong"] += 1
            self.failures[seed] = outcome.wrong[:400]
            print(seed, outcome.wrong[:400], file=sys.stderr, flush=True)
        elif outcome.refusal and outcome.meant:
            self.counts["refused_as_meant"] += 1
        elif outcome.refusal:
            self.counts["refused"] += 1
            reason = re.sub(r"\d+|at .*", "", outcome.refusal)[:90]
            self.refusals[reason] += 1
            self.seeds.setdefault(reason, []).append(seed)
        else:
            self.counts["equal"] += 1
            self.largest_error = max(self.largest_error, outcome.error)

    def summary(self) -> dict[str, Any]:
        kinds = ("models", "equal", "refused_as_meant", "refused", "wrong", "invalid")
        return {
            **{kind: self.counts[kind] for kind in kinds},
            "largest_error": self.largest_error,
            "refusals": dict(self.refusals),
            "refused_seeds": {reason: seeds[:5] for reason, seeds in self.seeds.items()},
            "invalid_because": dict(self.invalid.most_common(8)),
            "failures": self.failures,
        }


def scenario(rank: int, seeds: Sequence[int], ranks: int) -> list[dict[str, Any]]:
    """The outcomes of these seeds on one of several processes."""
    import benchmarks.coverage.wide_runs as runs

    def bound(pipe: Any, new_shape: str) -> Any:
        step = pipe.bind(seed=SEED, on_new_shape=new_shape, timeout_s=60)
        steps.append(step)
        return step

    found = []
    for seed in seeds:
        steps: list[Any] = []
        warnings.simplefilter("ignore")
        try:
            outcome = runs.compare(draw(Random(seed), ranks), bound)
        except Exception as error:
            cause = f" from {error.__cause__}" if error.__cause__ else ""
            outcome = Outcome(wrong=f"{type(error).__name__}: {error}{cause}")
        for step in steps:
            step.close()
        found.append(asdict(let_go(outcome)))
        if outcome.wrong:  # the other ranks may wait for this one
            raise RuntimeError(json.dumps({"seed": seed, "wrong": outcome.wrong}))
    return found


def over_processes(seeds: Sequence[int], ranks: int) -> Generator[tuple[int, Outcome]]:
    """The outcomes of seeds over workers that stay alive. After a wrong one the others of its group go on in a new
    one."""
    from benchmarks.coverage.fuzz_wide import scenario  # under the name by which other processes find it
    from tests.support.pool import Pool

    with closing(Pool()) as pool:
        waiting = list(seeds)
        while waiting:
            group, waiting = waiting[:TOGETHER], waiting[TOGETHER:]
            try:
                found = pool.launch(ranks, scenario, tuple(group), ranks)
            except AssertionError as error:
                told = re.search(r'RuntimeError: (\{"seed".*\})', str(error))
                seed = json.loads(told[1])["seed"] if told else group[0]
                yield seed, Outcome(wrong=json.loads(told[1])["wrong"] if told else str(error)[-3000:])
                position = group.index(seed)
                waiting = [*group[:position], *group[position + 1 :], *waiting]
                continue
            for seed, outcomes in zip(group, zip(*(found[rank] for rank in range(ranks)), strict=True), strict=True):
                told_by = [Outcome(**outcome) for outcome in outcomes]
                yield seed, next((o for o in told_by if o.refusal or o.invalid), told_by[0])


class Ended(BaseException):
    """The process is asked to end."""


def end(signal_number: int, frame: object) -> None:
    raise Ended


def begin() -> None:
    """Prepare this process for a campaign: one thread, no warnings, and SIGTERM ends it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, end)
    gc.freeze()  # the tracer collects garbage at every hook: what was imported is none


def campaign(first_seed: int, count: int, workers: int = 0) -> dict[str, Any]:
    """Run random models; the summary, of those that are done where the process is asked to end (SIGTERM). Tells how far
    it is on stderr."""
    begun, begun_cpu, tally = perf_counter(), process_time(), Tally()
    seeds = range(first_seed, first_seed + count)
    outcomes = over_processes(seeds, workers) if workers else ((seed, let_go(outcome_of(seed))) for seed in seeds)
    done = 0
    with suppress(Ended), closing(outcomes):
        for seed, outcome in outcomes:
            tally.add(seed, outcome)
            done += 1
            if done % PROGRESS == 0:
                print(json.dumps({"done": done, **tally.counts}), file=sys.stderr, flush=True)
    took = {"seconds": round(perf_counter() - begun, 1), "cpu_s": round(process_time() - begun_cpu, 1)}
    return {"seed": first_seed, "count": count, "done": done, "workers": workers, **tally.summary(), **took}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="of models")
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the others follow")
    parser.add_argument("--workers", type=int, default=0, help="ranks over processes (gloo); 0: all in this process")
    parser.add_argument("--out", type=Path, help="append the JSON object, with commit and versions, as one line")
    options = parser.parse_args(arguments)
    begin()
    row = {**environment(), **campaign(options.seed, options.count, options.workers)}
    if options.out:
        append_row(options.out, row)
    print(json.dumps(row, indent=1))
    return 1 if row["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
