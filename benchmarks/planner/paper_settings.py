"""The twelve settings of "Zero Bubble Pipeline Parallelism" as cost tables: its times and memory."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from zbfx.plan import CostTable, StageCost
from zbfx.schedule.orders.handmade import looped_placement
from zbfx.schedule.orders.vshape import v_placement
from zbfx.timing.exact import exact

TABLES = Path(__file__).parent / "paper"


def rows(table: str) -> list[dict[str, str]]:
    with open(TABLES / f"{table}.csv", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Setting:
    """One row of the paper's table of profiled times. Times in milliseconds, memory in the paper's units per layer."""

    model: str
    ranks: int
    microbatches: int
    layers_per_rank: int
    stage: StageCost
    comm_ms: Fraction
    paper_rates: dict[str, float]

    @property
    def name(self) -> str:
        return f"{self.model} p={self.ranks} m={self.microbatches}"

    def linear(self) -> CostTable:
        return CostTable.chain([self.stage] * self.ranks, self.comm_ms)

    def v_shaped(self) -> CostTable:
        """Two stages per rank, each with half the layers."""
        return CostTable.chain([self._part(2)] * (2 * self.ranks), self.comm_ms, v_placement(self.ranks))

    def interleaved(self) -> CostTable:
        """One layer per stage, as in the paper's 1F1B-I."""
        parts = self.layers_per_rank
        placement = looped_placement(self.ranks, parts)
        return CostTable.chain([self._part(parts)] * (parts * self.ranks), self.comm_ms, placement)

    def _part(self, parts: int) -> StageCost:
        whole = self.stage
        return StageCost(
            exact(whole.forward_s) / parts,
            exact(whole.backward_input_s) / parts,
            exact(whole.backward_weight_s) / parts,
            exact(whole.saved_bytes) / parts,
            exact(whole.weight_saved_bytes) / parts,
        )


def settings() -> list[Setting]:
    models = {row["model"]: row for row in rows("models")}
    rates = {(row["model"], row["microbatches"]): row for row in rows("bubble_rates")}
    found = []
    for row in rows("profiled_times_ms"):
        model = models[row["model"]]
        hidden, heads, sequence = (int(model[column]) for column in ("hidden", "heads", "sequence"))
        forward, backward, weight = (exact(float(row[column])) for column in ("t_f", "t_b", "t_w"))
        # M_B : M_W as in table 1 of the paper.
        stage = StageCost(forward, backward, weight, 34 * hidden + 5 * heads * sequence, 32 * hidden)
        paper = rates[row["model"], row["microbatches"]]
        found.append(
            Setting(
                model=row["model"],
                ranks=int(row["stages"]),
                microbatches=int(row["microbatches"]),
                # First and last stage have a layer less, in exchange for embedding and loss.
                layers_per_rank=(int(model["layers"]) + 2) // int(row["stages"]),
                stage=stage,
                comm_ms=exact(float(row["t_comm"])),
                paper_rates={
                    name: float(rate) for name, rate in paper.items() if name not in ("model", "stages", "microbatches")
                },
            )
        )
    return found
