"""Pipelines of unequal stages: how often the planner proves its schedule optimal, and how large the gap is else.

`python -m benchmarks.planner.random_instances [--seed 0] [--count 120] [--budget 4] [--json]`. p is 4 to 8, m is p/2 to
4p; a stage's T_F and T_B are 0.7 to 1.6 and its T_W 0.3 to 1.2 of a common unit, T_comm is 0 to 0.3 of it. M_W is 0.3
to 0.8 of M_B, and the limit 1, 1.25, 1.5 or 2 times p M_B.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from random import Random

from zbfx.errors import ZbfxError
from zbfx.plan import CostTable, StageCost
from zbfx.schedule import plan

UNIT = 1000  # ticks per common unit of time
HANDMADE = ("gpipe", "1f1b", "zb-h1", "zb-h2")


@dataclass(frozen=True)
class Case:
    costs: CostTable
    microbatches: int
    mem_limit: str


@dataclass(frozen=True)
class Row:
    index: int
    ranks: int
    microbatches: int
    mem_limit: str
    iteration: float
    lower_bound: float
    gap: float
    beats_handmade: bool
    seconds: float


def random_case(random: Random) -> Case:
    p = random.randint(4, 8)
    m = random.randint(p // 2, 4 * p)

    def times(low: float, high: float) -> list[int]:
        return [random.randint(round(low * UNIT), round(high * UNIT)) for _ in range(p)]

    forward, backward, weight = times(0.7, 1.6), times(0.7, 1.6), times(0.3, 1.2)
    comm, weight_saved = random.randint(0, round(0.3 * UNIT)), random.randint(30, 80)
    stages = [StageCost(f, b, w, 100, weight_saved) for f, b, w in zip(forward, backward, weight, strict=True)]
    return Case(CostTable.chain(stages, comm), m, random.choice(("1x", "1.25x", "1.5x", "2x")))


def random_cases(seed: int, count: int) -> list[Case]:
    random = Random(seed)
    return [random_case(random) for _ in range(count)]


def best_handmade(case: Case) -> float:
    """The shortest handmade schedule that fits."""
    found = [float("inf")]
    for name in HANDMADE:
        try:
            found.append(plan(case.costs, case.microbatches, schedule=name, mem_limit=case.mem_limit).iteration_s)
        except ZbfxError:
            continue
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--budget", type=float, default=4.0, metavar="SECONDS", help="per instance (default: 4)")
    parser.add_argument("--json", action="store_true", help="one JSON object per row and one for the summary")
    options = parser.parse_args()
    rows = []
    for index, case in enumerate(random_cases(options.seed, options.count)):
        found = plan(case.costs, case.microbatches, mem_limit=case.mem_limit, budget_s=options.budget)
        row = Row(
            index,
            case.costs.rank_count,
            case.microbatches,
            case.mem_limit,
            found.iteration_s,
            found.lower_bound_s,
            found.gap,
            found.iteration_s <= best_handmade(case),
            found.search_s,
        )
        rows.append(row)
        if options.json:
            print(json.dumps(asdict(row)))
        else:
            verdict = "optimal" if row.gap == 0 else f"gap {100 * row.gap:.3f} %"
            print(f"{index:4} p={row.ranks} m={row.microbatches:<3} {row.mem_limit:6} {verdict:14} {row.seconds:.2f} s")
        sys.stdout.flush()
    summary = {
        "seed": options.seed,
        "mean_gap_percent": 100 * sum(row.gap for row in rows) / len(rows),
        "proven_optimal_percent": 100 * sum(row.gap == 0 for row in rows) / len(rows),
        "worse_than_handmade": sum(not row.beats_handmade for row in rows),
        "mean_seconds": sum(row.seconds for row in rows) / len(rows),
    }
    print(json.dumps(summary) if options.json else "\n".join(f"{name}: {value:.4g}" for name, value in summary.items()))


if __name__ == "__main__":
    main()
