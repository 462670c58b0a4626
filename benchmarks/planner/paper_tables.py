"""The paper's tables of bubble rates, planned again: `python -m benchmarks.planner.paper_tables [--json]`.

Table 4 (six schedules at twelve settings), the limits between p M_B and 2.5 p M_B, the V placement with halved times,
and the table of ZB-V (nine settings, whose times `paper_fit` recovers from the table itself). Every row gives the
paper's value or the best known one, ours, the lower bound, the gap and the seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain

from benchmarks.planner.paper_fit import zbv_settings
from benchmarks.planner.paper_settings import Setting, settings
from zbfx.plan import CostTable
from zbfx.schedule import plan
from zbfx.schedule.schedule import Schedule

COLUMNS = {  # the paper's column: our schedule
    "1f1b": "1f1b",
    "1f1b-i": "interleaved-1f1b",
    "zb-h1": "zb-h1",
    "zb-h2": "zb-h2",
    "zb-1p": "zb-1p",
    "zb-2p": "zb-2p",
}

# Best bubble rates known before, by setting and by multiple of p M_B.
BETWEEN = {
    ("1.5B", 32): {"1.125x": 0.0995, "1.25x": 0.0782, "1.5x": 0.0401, "1.75x": 0.0163, "2.5x": 0.0006},
    ("6.2B", 32): {"1.125x": 0.0787, "1.25x": 0.0578, "1.5x": 0.0363, "1.75x": 0.0138, "2.5x": 0.0003},
    ("14.6B", 48): {"1.125x": 0.1094, "1.25x": 0.0837, "1.5x": 0.0571, "1.75x": 0.0289, "2.5x": 0.0004},
}
V_PLACEMENT = {
    ("1.5B", 24): {"1x": 0.0703},
    ("1.5B", 32): {"1x": 0.0543, "1.25x": 0.0226, "1.5x": 0.0027},
    ("1.5B", 64): {"1x": 0.0298},
    ("6.2B", 24): {"1x": 0.0403},
    ("6.2B", 32): {"1x": 0.0326, "1.25x": 0.0086},
    ("6.2B", 64): {"1x": 0.0166},
    ("14.6B", 48): {"1x": 0.0498, "1.25x": 0.0185, "1.5x": 0.0},
    ("14.6B", 64): {"1x": 0.0381},
    ("14.6B", 128): {"1x": 0.0195},
    ("28.3B", 96): {"1x": 0.0531, "1.25x": 0.0185, "1.5x": 0.0},
    ("28.3B", 128): {"1x": 0.0404},
    ("28.3B", 256): {"1x": 0.0220},
}


@dataclass(frozen=True)
class Row:
    table: str
    setting: str
    schedule: str
    mem_limit: str | None
    reference: float | None  # the paper's value, or the best known before
    bubble_rate: float
    bound_bubble_rate: float  # no schedule has less
    gap: float
    peak_memory: float  # in p M_B
    seconds: float


def planned(
    table: str,
    setting: Setting,
    costs: CostTable,
    schedule: str,
    reference: float | None,
    mem_limit: str | None,
    budget_s: float,
) -> Row:
    found = plan(costs, setting.microbatches, schedule=schedule, mem_limit=mem_limit, budget_s=budget_s)
    work = setting.microbatches * float(setting.stage.work_s)
    return Row(
        table,
        setting.name,
        schedule,
        mem_limit,
        reference,
        found.bubble_rate,
        1 - work / found.lower_bound_s,
        found.gap,
        peak(found, setting),
        found.search_s,
    )


def peak(found: Schedule, setting: Setting) -> float:
    return max(found.peak_bytes) / (setting.ranks * float(setting.stage.saved_bytes))


def closed_form(setting: Setting) -> Row:
    """1F1B-I as the paper computes it: m S + (p - 1) S / v + (2 p v - p - 2) T_comm."""
    p, v, m = setting.ranks, setting.layers_per_rank, setting.microbatches
    work = float(setting.stage.work_s)
    cost = m * work + (p - 1) * work / v + (2 * p * v - p - 2) * float(setting.comm_ms)
    rate = 1 - m * work / cost
    return Row(
        "paper", setting.name, "1f1b-i closed form", None, setting.paper_rates["1f1b-i"], rate, 0.0, 0.0, 0.0, 0.0
    )


def table_rows(tables: list[str], budget_s: float) -> Iterator[Row]:
    for setting in settings():
        key = setting.model, setting.microbatches
        if "paper" in tables:
            for column, schedule in COLUMNS.items():
                costs = setting.interleaved() if column == "1f1b-i" else setting.linear()
                yield planned("paper", setting, costs, schedule, setting.paper_rates[column], None, budget_s)
            yield closed_form(setting)
        if "between" in tables:
            for limit, reference in BETWEEN.get(key, {}).items():
                yield planned("between", setting, setting.linear(), "auto", reference, limit, budget_s)
        if "v" in tables:
            for limit, reference in V_PLACEMENT[key].items():
                yield planned("v", setting, setting.v_shaped(), "auto", reference, limit, budget_s)


def zbv_rows(budget_s: float) -> Iterator[Row]:
    for setting in zbv_settings():
        for column in ("1f1b", "1f1b-i", "zb-h1", "zb-h2"):
            costs = setting.interleaved() if column == "1f1b-i" else setting.linear()
            yield planned("zbv", setting, costs, COLUMNS[column], setting.paper_rates[column], None, budget_s)
        yield planned("zbv", setting, setting.v_shaped(), "zb-v", setting.paper_rates["zb-v"], "1x", budget_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument(
        "--budget", type=float, default=60.0, metavar="SECONDS", help="per searched schedule (default: 60)"
    )
    tables = ("paper", "between", "v", "zbv")
    parser.add_argument("--tables", nargs="+", choices=tables, default=list(tables))
    options = parser.parse_args()
    if not options.json:
        head = ("table", "setting", "schedule", "limit", "ref", "ours", "bound", "gap", "mem", "s")
        print("{:8} {:20} {:18} {:7} {:>7} {:>8} {:>8} {:>9} {:>6} {:>6}".format(*head))
    zbv = zbv_rows(options.budget) if "zbv" in options.tables else iter(())
    for row in chain(table_rows(options.tables, options.budget), zbv):
        if options.json:
            print(json.dumps(asdict(row)))
        else:
            reference = "" if row.reference is None else f"{row.reference:.4f}"
            print(
                f"{row.table:8} {row.setting:20} {row.schedule:18} {row.mem_limit or '':7} {reference:>7} "
                f"{row.bubble_rate:8.5f} {row.bound_bubble_rate:8.5f} {row.gap:9.2e} {row.peak_memory:6.3f} "
                f"{row.seconds:6.2f}"
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
