"""The nine settings of the paper's table of ZB-V bubble rates, whose profiled times it does not print.

Its columns determine them: with T_F = T_B (they differ by less than 2 % wherever the paper prints both), the rate of
1F1B fixes T_comm and that of ZB-H1 fixes T_W, in units of T_F. The rate of ZB-H2 is then a check.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from benchmarks.planner.paper_settings import Setting, rows
from zbfx.plan import StageCost
from zbfx.schedule import simulate
from zbfx.schedule.orders.registry import GENERATORS

ROUNDS, HALVINGS = 3, 11
FORWARD = Fraction(1000)


def zbv_settings() -> Iterator[Setting]:
    """One setting per row of bubble_rates_zbv.csv, with fitted times; times in thousandths of T_F."""
    models = {row["model"]: row for row in rows("models")}
    for row in rows("bubble_rates_zbv"):
        model = models[row["model"]]
        hidden, heads, sequence = (int(model[column]) for column in ("hidden", "heads", "sequence"))
        ranks = int(row["stages"])
        start = Setting(
            model=row["model"],
            ranks=ranks,
            microbatches=int(row["microbatches"]),
            layers_per_rank=(int(model["layers"]) + 2) // ranks,
            stage=StageCost(FORWARD, FORWARD, FORWARD, 34 * hidden + 5 * heads * sequence, 32 * hidden),
            comm_ms=Fraction(0),
            paper_rates={name: float(row[name]) for name in ("1f1b", "1f1b-i", "zb-h1", "zb-h2", "zb-v")},
        )
        yield fitted(start)


def fitted(setting: Setting) -> Setting:
    for _ in range(ROUNDS):
        setting = replace(setting, comm_ms=crossing(setting, "1f1b", 0, 300))
        weight = crossing(setting, "zb-h1", 400, 1200)
        setting = replace(setting, stage=replace(setting.stage, backward_weight_s=weight))
    return setting


def rate_of(setting: Setting, schedule: str) -> float:
    """The bubble rate of a handmade schedule, simulated."""
    costs, m = setting.linear(), setting.microbatches
    iteration_s = simulate(costs, m, GENERATORS[schedule](costs, m)).iteration_s
    return 1 - m * float(setting.stage.work_s) / iteration_s


def crossing(setting: Setting, schedule: str, low: int, high: int) -> Fraction:
    """The T_comm ("1f1b": the rate rises with it) or T_W ("zb-h1": the rate falls with it) of the paper's rate."""
    least, most = Fraction(low), Fraction(high)
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        if schedule == "1f1b":
            tried = replace(setting, comm_ms=middle)
        else:
            tried = replace(setting, stage=replace(setting.stage, backward_weight_s=middle))
        too_high = rate_of(tried, schedule) > setting.paper_rates[schedule]
        least, most = (least, middle) if too_high == (schedule == "1f1b") else (middle, most)
    return (least + most) / 2
