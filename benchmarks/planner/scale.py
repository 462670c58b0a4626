"""Many ranks and many microbatches: time, memory and gap of `auto`, one JSON object a row.

`python -m benchmarks.planner.scale [--ranks 64 128] [--shapes linear v] [--stages alike unequal] [--long]`. m is 2p,
the limit 1.5x (V: 1x); unequal stages are 15 % apart, the first and the last take 1.25 times as long. The budget is 5 s
up to 256 ranks, else 60 s. `--long` plans 20,000 microbatches on 8 ranks. Every row comes from a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from dataclasses import asdict, dataclass
from itertools import product
from random import Random

from zbfx.plan import CostTable, StageCost
from zbfx.schedule import V, plan

FORWARD, BACKWARD, WEIGHT, COMM = 1000, 1050, 700, 30
LIMITS = {"linear": "1.5x", "v": "1x"}


@dataclass(frozen=True)
class Row:
    ranks: int
    microbatches: int
    shape: str
    stages: str
    mem_limit: str
    budget_s: float
    iteration: float
    lower_bound: float
    gap_percent: float
    wall_s: float
    processor_s: float
    peak_mib: int
    notes: tuple[str, ...]


def costs_of(p: int, shape: str, stages: str, seed: int) -> CostTable:
    """Times in whole numbers. Stages of a V are half as long."""
    random = Random(seed)
    count = {"linear": p, "v": 2 * p}[shape]
    rows = []
    for index in range(count):
        factor = p / count
        if stages == "unequal":
            factor *= random.uniform(0.925, 1.075) * (1.25 if index in (0, count - 1) else 1)
        f, b, w = (round(factor * time_) for time_ in (FORWARD, BACKWARD, WEIGHT))
        rows.append(StageCost(f, b, w, 100 * p // count, 50 * p // count))
    return CostTable.chain(rows, COMM, {"linear": None, "v": V.placement(p, 2)}[shape])


def measured(p: int, m: int, shape: str, stages: str, seed: int) -> Row:
    costs, limit, budget_s = costs_of(p, shape, stages, seed), LIMITS[shape], 5.0 if p <= 256 else 60.0
    wall_s, processor_s = time.perf_counter(), time.process_time()
    found = plan(costs, m, mem_limit=limit, budget_s=budget_s)
    return Row(
        p,
        m,
        shape,
        stages,
        limit,
        budget_s,
        found.iteration_s,
        found.lower_bound_s,
        100 * found.gap,
        time.perf_counter() - wall_s,
        time.process_time() - processor_s,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        tuple(note for note in found.notes if "not compared" not in note),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--shapes", nargs="+", choices=tuple(LIMITS), default=list(LIMITS))
    parser.add_argument("--stages", nargs="+", choices=("alike", "unequal"), default=["alike", "unequal"])
    parser.add_argument("--long", action="store_true", help="20,000 microbatches on 8 ranks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sizes = [(8, 20_000)] if options.long else [(p, 2 * p) for p in options.ranks]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for (p, m), shape, stages in product(sizes, options.shapes, options.stages):
            print(json.dumps(asdict(pool.apply(measured, (p, m, shape, stages, options.seed)))), flush=True)


if __name__ == "__main__":
    main()
