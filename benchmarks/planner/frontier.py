"""The planner beside published heuristics and its own bounds: V placements, random unequal stages, fused backwards.

`python -m benchmarks.planner.frontier QUESTION [--seed 0] [--count 20] [--budget 5]` prints a JSON object per row, and
one that sums up. The questions:

v-tables     V-Half and V-Min in the memory of the authors' own schedules, p = 8 to 32: `auto` beside these
zb-v         the paper's twelve ZB-V settings beside the authors' greedy
linear, v, interleaved
             random unequal stages: the ends 1 to 1.3 times as long, the others 15 % apart, T_B 0.8 to 1.5 and T_W 0.4
             to 1.1 of T_F, p = 3 to 12, m = p to 4p, communication per boundary, limits of 1x to 2x
fusing       random stages whose fused backward is 5 to 20 % shorter than B and W, beside whole stages fused
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.planner.paper_settings import settings
from zbfx.plan import CostTable, StageCost
from zbfx.schedule import Schedule, build, plan
from zbfx.schedule.orders.handmade import looped_placement
from zbfx.schedule.orders.vshape import v_half, v_min, v_placement
from zbfx.schedule.search.order_search import OrderSearch
from zbfx.timing.limits import limit_per_rank

UNIT = 1000  # ticks of a mean F
LIMITS = ("1x", "1.25x", "1.5x", "2x")
# Bubble rates of the greedy of the authors of ZB-V, by model and microbatches; they print four digits.
GREEDY_ZB_V = {
    ("14.6B", 48): 0.0498,
    ("14.6B", 64): 0.0381,
    ("14.6B", 128): 0.0195,
    ("28.3B", 256): 0.0220,
}
PLACEMENTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "linear": lambda p: tuple(range(p)),
    "v": v_placement,
    "interleaved": lambda p: looped_placement(p, 2),
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    costs: CostTable
    microbatches: int
    mem_limit: str


def random_case(random: Random, placement: Callable[[int], tuple[int, ...]], fused: bool = False) -> Case:
    p = random.randint(3, 12)
    m = random.randint(p, 4 * p)
    places = placement(p)
    backward, weight, held = random.uniform(0.8, 1.5), random.uniform(0.4, 1.1), random.uniform(0.3, 0.8)
    ends = {0: random.uniform(1, 1.3), len(places) - 1: random.uniform(1, 1.3)}
    stages = []
    for stage in range(len(places)):
        forward = UNIT * random.uniform(0.85, 1.15) * ends.get(stage, 1.0)
        size = 1000 * random.uniform(0.85, 1.15)
        b, w = (round(forward * share * random.uniform(0.95, 1.05)) for share in (backward, weight))
        whole = round((b + w) * random.uniform(0.8, 0.95)) if fused else None
        stages.append(StageCost(round(forward), b, w, round(size), round(held * size), backward_s=whole))
    comm = [random.randint(0, round(0.3 * UNIT)) for _ in stages[1:]]
    return Case(CostTable.chain(stages, comm, places), m, random.choice(LIMITS))


def described(found: Schedule, begun_s: float, begun_cpu_s: float) -> Row:
    return {
        "p": found.costs.rank_count,
        "m": found.microbatches,
        "iteration": found.iteration_s,
        "lower_bound": found.lower_bound_s,
        "gap_percent": 100 * found.gap,
        "bubble_rate": round(found.bubble_rate, 5),
        "seconds": round(time.perf_counter() - begun_s, 2),
        "processor_seconds": round(time.process_time() - begun_cpu_s, 2),
    }


def planned(*arguments: Any, **options: Any) -> tuple[Schedule, Row]:
    begun = time.perf_counter(), time.process_time()
    found = plan(*arguments, **options)
    return found, described(found, *begun)


def v_tables(seed: int, count: int, budget_s: float) -> Iterator[Row]:
    """Each of the paper's settings, and equal stages, in the memory of V-Half and of V-Min."""
    cases = [(setting.name, setting.v_shaped(), setting.microbatches) for setting in settings()]
    for p in (8, 9, 16, 24, 32):
        cases.append((f"equal p={p}", CostTable.chain([StageCost(1, 1, 1, 1, 1)] * 2 * p, 0, v_placement(p)), 3 * p))
    for name, costs, m in cases[:count]:
        for family, generate in (("v-half", v_half), ("v-min", v_min)):
            known = build(family, costs, m, generate(costs, m))
            limit = max(known.peak_bytes)
            _, row = planned(costs, m, mem_limit=limit, budget_s=budget_s, seed=seed)
            worse = row["iteration"] > known.iteration_s
            yield {"case": name, "family": family, "published": round(known.bubble_rate, 5), "worse": worse, **row}


def zb_v(seed: int, count: int, budget_s: float) -> Iterator[Row]:
    for setting in settings()[:count]:
        _, row = planned(setting.v_shaped(), setting.microbatches, schedule="zb-v", budget_s=budget_s, seed=seed)
        known = GREEDY_ZB_V.get((setting.model, setting.microbatches))
        worse = known is not None and round(row["bubble_rate"], 4) > known
        yield {"case": setting.name, "published": known, "worse": worse, **row}


def unequal(placement: str) -> Callable[[int, int, float], Iterator[Row]]:
    def rows(seed: int, count: int, budget_s: float) -> Iterator[Row]:
        random = Random(seed)
        for index in range(count):
            case = random_case(random, PLACEMENTS[placement])
            _, row = planned(case.costs, case.microbatches, mem_limit=case.mem_limit, budget_s=budget_s, seed=seed)
            yield {"case": f"{placement} {index}", "mem_limit": case.mem_limit, "worse": False, **row}

    return rows


def fusing(seed: int, count: int, budget_s: float) -> Iterator[Row]:
    """`published`: the same search where every stage fuses whole or not at all."""
    random = Random(seed)
    for index in range(count):
        case = random_case(random, PLACEMENTS["linear"], fused=True)
        limits = limit_per_rank(case.costs, case.mem_limit)
        search = OrderSearch(case.costs, case.microbatches, limits, seed, time.perf_counter() + budget_s)
        search.try_fused()
        whole = None if search.best is None else search.problem.seconds(search.cost)
        _, row = planned(case.costs, case.microbatches, mem_limit=case.mem_limit, budget_s=budget_s, seed=seed)
        worse = whole is not None and row["iteration"] > whole
        yield {"case": f"fusing {index}", "mem_limit": case.mem_limit, "published": whole, "worse": worse, **row}


QUESTIONS = {"v-tables": v_tables, "zb-v": zb_v, "fusing": fusing, **{name: unequal(name) for name in PLACEMENTS}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--budget", type=float, default=5.0, metavar="SECONDS", help="per row (default: 5)")
    options = parser.parse_args()
    rows = []
    for row in QUESTIONS[options.question](options.seed, options.count, options.budget):
        rows.append(row)
        print(json.dumps(row), flush=True)
    summary = {
        "question": options.question,
        "seed": options.seed,
        "rows": len(rows),
        "worse": sum(row["worse"] for row in rows),
        "mean_gap_percent": sum(row["gap_percent"] for row in rows) / len(rows),
        "proven_percent": 100 * sum(row["gap_percent"] == 0 for row in rows) / len(rows),
        "most_seconds": max(row["seconds"] for row in rows),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
