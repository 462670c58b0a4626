"""How far integer programs reach: whole problems to proven optimality, and windows where search leaves a gap.

`python -m benchmarks.planner.ilp_scaling [--part oracle|windows] [--limit 60] [--json]`. The oracle starts from ZB-H1,
without a lower bound, and is compared with the planner's result. The windows start from what search without integer
programs reaches in `--budget` seconds on the cases of `benchmarks.planner.random_instances`, until `--count` cases with
a gap are found.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count as count_up
from time import perf_counter

from benchmarks.planner.random_instances import Case, random_cases
from zbfx.errors import ZbfxError
from zbfx.plan import CostTable, StageCost
from zbfx.schedule import plan
from zbfx.schedule.integer.precedence import forced_precedence
from zbfx.schedule.integer.solver import SolverFailed
from zbfx.schedule.integer.window import TimedOrders, open_window
from zbfx.schedule.orders.registry import GENERATORS
from zbfx.schedule.search.order_search import OrderSearch
from zbfx.schedule.search.refine import optimum, refine_search
from zbfx.timing.exact import instance
from zbfx.timing.limits import limit_per_rank

RANKS = 4
MICROBATCHES = (4, 6, 8, 10, 12)
# The 1.5B model of the paper: profiled times in ms, M_B : M_W = (34h + 5as) : 32h with h = 2304, a = 24, s = 1024.
STAGES = {
    "equal": (StageCost(1, 1, 1, 2, 1), 0),
    "1.5B": (StageCost(18.522, 18.086, 9.337, 34 * 2304 + 5 * 24 * 1024, 32 * 2304), 0.601),
}


@dataclass(frozen=True)
class OracleRow:
    """One whole problem. `open_pairs`: pairs of actions whose order the incumbent's cost leaves open."""

    costs: str
    ranks: int
    microbatches: int
    mem_limit: str
    open_pairs: int
    iteration: float | None
    proven: bool
    planner_iteration: float
    seconds: float


@dataclass(frozen=True)
class WindowRow:
    """One random case. Gaps against the lower bound, in percent; `settled`: the program itself proved optimality."""

    index: int
    ranks: int
    microbatches: int
    mem_limit: str
    gap_before_percent: float
    gap_after_percent: float
    improved: bool
    settled: bool
    seconds: float


def oracle_rows(limit_s: float) -> Iterator[OracleRow]:
    for name, (stage, comm_s) in STAGES.items():
        costs = CostTable.chain([stage] * RANKS, comm_s)
        for m in MICROBATCHES:
            for limit in ("1x", "2x"):
                yield oracle_row(name, costs, m, limit, limit_s)


def oracle_row(name: str, costs: CostTable, m: int, limit: str, limit_s: float) -> OracleRow:
    planned = plan(costs, m, mem_limit=limit)
    problem = instance(costs, m)
    units = problem.units(limit_per_rank(costs, limit))
    timed = TimedOrders.of(problem, problem.encode(plan(costs, m, schedule="zb-h1", mem_limit=limit).ranks))
    forced = forced_precedence(open_window(timed, 0, len(timed.codes)), max(timed.spans_ticks), units)
    begun = perf_counter()
    iteration, proven = None, False
    try:
        found = optimum(problem, timed.orders, units, 0, limit_s)
        iteration, proven = problem.seconds(found.cost_ticks), found.proven
    except SolverFailed:
        pass  # the row says so: no iteration time, not proven
    return OracleRow(
        costs=name,
        ranks=RANKS,
        microbatches=m,
        mem_limit=limit,
        open_pairs=0 if forced is None else len(forced.open_pairs()),
        iteration=iteration,
        proven=proven,
        planner_iteration=planned.iteration_s,
        seconds=perf_counter() - begun,
    )


def window_rows(seed: int, wanted: int, budget_s: float, limit_s: float) -> Iterator[WindowRow]:
    found = 0
    for index in count_up():
        if found == wanted:
            return
        case = random_cases(seed, index + 1)[index]
        search = searched(case, budget_s)
        if search.cost > search.target:
            found += 1
            yield window_row(index, case, search, limit_s)


def searched(case: Case, budget_s: float) -> OrderSearch:
    """The planner's search alone."""
    limits = limit_per_rank(case.costs, case.mem_limit)
    search = OrderSearch(case.costs, case.microbatches, limits, 0, perf_counter() + budget_s)
    search.lead()
    for name, generate in GENERATORS.items():
        try:
            search.compare(name, generate(case.costs, case.microbatches))
        except ZbfxError:
            continue  # meant for another placement
    search.run()
    return search


def window_row(index: int, case: Case, search: OrderSearch, limit_s: float) -> WindowRow:
    cost, bound = search.cost, search.target
    begun = perf_counter()
    refine_search(search, begun + limit_s)
    return WindowRow(
        index=index,
        ranks=case.costs.rank_count,
        microbatches=case.microbatches,
        mem_limit=case.mem_limit,
        gap_before_percent=100 * (cost / bound - 1),
        gap_after_percent=100 * (search.cost / search.target - 1),
        improved=search.cost < cost,
        settled="integer program" in search.certificate.arguments,
        seconds=perf_counter() - begun,
    )


def report(row: OracleRow | WindowRow) -> str:
    head = f"p={row.ranks} m={row.microbatches:<3} {row.mem_limit:6}"
    if isinstance(row, OracleRow):
        verdict = "optimal" if row.proven else "not proven"
        return f"{row.costs:6} {head} {row.open_pairs:5} pairs  {row.iteration} {verdict}, {row.seconds:.2f} s"
    gaps = f"gap {row.gap_before_percent:.3f} % -> {row.gap_after_percent:.3f} %"
    return f"{row.index:4} {head} {gaps}{', settled' if row.settled else ''}, {row.seconds:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=("oracle", "windows"), help="default: both")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="per problem (default: 60)")
    parser.add_argument("--budget", type=float, default=4.0, metavar="SECONDS", help="of the search (default: 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20, help="random cases with a gap (default: 20)")
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    options = parser.parse_args()
    if options.part != "windows":
        for row in oracle_rows(options.limit):
            print(json.dumps(asdict(row)) if options.json else report(row), flush=True)
    if options.part != "oracle":
        narrowed = 0
        for window in window_rows(options.seed, options.count, options.budget, options.limit):
            narrowed += window.gap_after_percent < window.gap_before_percent
            print(json.dumps(asdict(window)) if options.json else report(window), flush=True)
        summary = {"cases": options.count, "closed_or_narrowed": narrowed}
        print(json.dumps(summary) if options.json else f"closed or narrowed: {narrowed} of {options.count}")


if __name__ == "__main__":
    main()
