"""Training throughput of zbfx, of torch.distributed.pipelining, and of the bubble-free limit, in one run.

    torchrun --nproc-per-node=2 --max-restarts=50 -- benchmarks/throughput/compare.py --config 350M --b 2 \\
        --m 8,12,32 --out FILE

writes one JSON line per case; a case that fails gives a line with `error`. A case that hangs ends its processes and
takes one restart; without `--max-restarts` the first one ends the run. `--` keeps torchrun from reading `--m` as its
own. `--list` prints the cases in order. `python -m benchmarks.throughput.table FILE` makes the table.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, cast

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import rows
from benchmarks.measure import Measured, Runnable, measure, synchronize
from benchmarks.place import Place
from benchmarks.rows import Row
from benchmarks.stages import CONFIGS, LayerCosts
from benchmarks.throughput.cases import SYSTEMS, TORCH_SCHEDULES, Case, expand
from benchmarks.throughput.limits import layer_costs, limit
from benchmarks.throughput.ours import ours
from benchmarks.throughput.peers import peer
from benchmarks.world import FAILURE_GRACE_S, Journal, World, time_limit

T = TypeVar("T")
TORCH_DEFAULT = [name for name, kind in TORCH_SCHEDULES.items() if not kind.checkpoint]


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def run_flags(flags: argparse.ArgumentParser, out: str) -> None:
    """The flags of every benchmark that runs case after case."""
    flags.add_argument("--case-timeout-s", type=float, default=150.0)
    flags.add_argument("--budget-s", type=float, default=float("inf"), help="start no case after this long")
    flags.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    flags.add_argument("--commit", help="recorded in every row; asked from git by default")
    flags.add_argument("--out", type=Path, default=Path(out), help="rows are appended")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--config", choices=list(CONFIGS), default="350M")
    flags.add_argument("--b", type=int, default=2, help="sequences in a microbatch")
    flags.add_argument("--microbatches", "--m", dest="m", type=numbers, default=[8, 12, 32], metavar="8,12,32")
    flags.add_argument(
        "--systems", type=words, default=list(SYSTEMS), help=f"of {','.join(SYSTEMS)}; run in this order"
    )
    flags.add_argument("--splits", type=words, default=["bal", "even"], help="layer splits of torch and limit")
    flags.add_argument("--limit-backends", type=words, default=["eager", "inductor"])
    flags.add_argument("--torch-schedules", type=words, default=TORCH_DEFAULT)
    flags.add_argument("--torch-backends", type=words, default=["eager", "inductor"])
    flags.add_argument("--zbfx-schedules", type=words, default=["zb-1p"], help="see benchmarks/throughput/cases.py")
    flags.add_argument("--zbfx-backends", type=words, default=["eager"])
    flags.add_argument("--zbfx-splits", type=words, default=["auto"], help="auto, rebalanced, bal, even")
    flags.add_argument("--costs", default="measure", help="what zbfx plans from: measure or estimate")
    flags.add_argument("--head-layers", type=float, help="what the head costs in blocks; measured by default")
    flags.add_argument("--only", action="append", default=[], metavar="REGEX", help="run the cases it finds, no others")
    flags.add_argument("--first", action="append", default=[], metavar="REGEX", help="run the cases it finds first")
    flags.add_argument("--warmup", type=int, default=3)
    flags.add_argument("--repeats", type=int, default=10)
    run_flags(flags, "throughput.jsonl")
    flags.add_argument("--list", action="store_true", help="print the cases and stop")
    return flags


class CaseFailed(Exception):
    """A case that some rank could not run; the message is the first such rank's."""


class Benchmark:
    """The cases of one run on this process's rank."""

    def __init__(self, options: argparse.Namespace, world: World, cases: Sequence[Any]) -> None:
        self.options, self.world, self.cases = options, world, cases
        dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
        self.place = Place(world.rank, world.ranks, world.device, dtype, timeout_s=options.case_timeout_s)
        self.machine = rows.machine(self.place, options.commit)
        self.journal = Journal(options.out.with_suffix(options.out.suffix + ".journal"))

    def run(self) -> None:
        for index in range(self.resume(), len(self.cases)):
            if self.agree(f"in time/{index}", self.journal.elapsed_s < self.options.budget_s if self.leads else None):
                self.run_case(index)
            else:
                self.finish(index, error=f"not run: more than {self.options.budget_s:g} s had passed")
        self.agree("over", None)
        if self.leads:
            self.journal.path.unlink()

    @property
    def leads(self) -> bool:
        return self.world.rank == 0

    def agree(self, key: str, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return self.world.gather(key, value)[0]

    def resume(self) -> int:
        """The first case to run; after a restart, one past the case that ended the processes."""
        if self.leads:
            if self.world.restart == 0:
                self.journal.begin()
            elif (lost := self.journal.unfinished()) is not None:
                waited = f"no answer within {self.options.case_timeout_s:g} s, or a process died"
                self.finish(lost, error=self.journal.failure(lost) or waited)
        return int(self.agree("resume", self.journal.finished() if self.leads else None))

    def finish(self, index: int, **results: Any) -> None:
        """Write a case's row."""
        if self.leads:
            row = self.row(index, **results)
            with self.options.out.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            self.journal.write(end=index)
            report(self.cases[index], row, self.journal.elapsed_s)

    def row(self, index: int, **results: Any) -> Any:
        return Row(**asdict(self.cases[index]), p=self.world.ranks, **results, **self.machine)

    def run_case(self, index: int) -> None:
        if self.leads:
            self.journal.write(begin=index)
        with time_limit(self.options.case_timeout_s):
            try:
                with self.world.process_group(str(index), self.options.case_timeout_s):
                    results = self.build_and_measure(index)
            except CaseFailed as failure:
                results = {"error": str(failure)}
            synchronize(self.world.device)  # a device that is broken for good ends the process here
        self.finish(index, **results)

    def build_and_measure(self, index: int) -> dict[str, Any]:
        begun = perf_counter()
        runnable = self.together(f"build/{index}", index, lambda: self.build(self.cases[index]))
        build_s = perf_counter() - begun
        try:
            return self.measure(index, runnable) | {"build_s": round(build_s, 2)}
        finally:
            del runnable  # captured graphs go before the communicators that they use
            gc.collect()

    def measure(self, index: int, runnable: Runnable) -> dict[str, Any]:
        options = {"warmup": self.options.warmup, "repeats": self.options.repeats}
        measured = self.together(f"run/{index}", index, lambda: measure(runnable, self.world.device, **options))
        runnable.close()
        everyone = [Measured(**entry) for entry in self.world.gather(f"measured/{index}", asdict(measured))]
        return rows.results(self.cases[index], runnable, everyone)

    def together(self, key: str, index: int, action: Callable[[], T]) -> T:
        """Do something on every rank, and raise `CaseFailed` on all if it fails on one.

        Ranks that wait for one that failed never arrive here: then this process ends, and all start afresh.
        """
        result, error = None, None
        try:
            result = action()
        except Exception as failure:
            error = f"rank {self.world.rank}: {describe(failure)}"
            self.journal.write(failed=index, text=error)
        try:
            errors = self.world.gather(key, error, FAILURE_GRACE_S if error else self.options.case_timeout_s)
        except Exception:
            os._exit(1)
        for text in errors:
            if text:
                raise CaseFailed(text)
        return cast(T, result)

    def build(self, case: Case) -> Runnable:
        if case.split == "bal":
            self.weigh(case)
        if case.system == "zbfx":
            return ours(case, self.place, self.options.costs)
        return (peer if case.system == "torch" else limit)(case, self.place)

    def weigh(self, case: Case) -> None:
        """Find what the head costs in blocks, once for each model and microbatch: rank 0's measurement holds."""
        key = (case.config, case.b)
        if key in self.place.costs:
            return
        if self.options.head_layers is not None:
            costs = LayerCosts(0.0, self.options.head_layers)
        else:
            costs = LayerCosts(**self.agree(f"costs/{key}", asdict(layer_costs(*key, self.place))))
        self.place.costs[key] = costs
        if self.leads:
            print(f"embeddings cost {costs.embedding:.2f} blocks, head and loss {costs.head:.2f}", file=sys.stderr)


def describe(failure: Exception) -> str:
    """The failure's kind and the first lines of its message."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:500]}"


def report(case: Any, row: Any, elapsed_s: float) -> None:
    """One line on stderr as a case ends."""
    outcome = row.error or f"{row.step_ms:.2f} ms, peak {row.peak_gib} GiB, loss {row.loss}"
    print(f"[{elapsed_s:5.0f} s] {case.name}: {outcome}", file=sys.stderr, flush=True)


def prepared(options: argparse.Namespace) -> Benchmark | None:
    """The benchmark of these flags; None if they ask for the list of its cases."""
    if options.list:
        print("\n".join(case.name for case in expand(options)))
        return None
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    return Benchmark(options, World.from_environment(options.device), expand(options))


def main(arguments: Sequence[str] | None = None) -> None:
    benchmark = prepared(parser().parse_args(arguments))
    if benchmark is not None:
        benchmark.run()


if __name__ == "__main__":
    main()
