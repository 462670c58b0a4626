"""Where a case runs: this process's rank and device, and the stages that belong to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from benchmarks.stages import CONFIGS, LayerCosts, Piece, layers_per_stage, pieces
from benchmarks.throughput.cases import Case


@dataclass
class Place:
    """One process of the benchmark. `costs` weigh embeddings and head for the "bal" split."""

    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    costs: dict[tuple[str, int], LayerCosts] = field(default_factory=dict)  # by config and b
    timeout_s: float = 150.0
    compiled: str = ""  # what the compiler holds code for

    def fresh_compiler(self, key: str) -> None:
        """Drop compiled code unless it was made for `key`: what is not the same is never specialised together."""
        if key != self.compiled:
            torch.compiler.reset()
            self.compiled = key


def placement(ranks: int, stages_per_rank: int, style: str) -> list[int]:
    """The rank of each stage: round and round ("loop"), or down the ranks and up again ("v")."""
    down = list(range(ranks))
    return [rank for turn in range(stages_per_rank) for rank in (reversed(down) if style == "v" and turn % 2 else down)]


def layer_counts(case: Case, place: Place, placed: list[int]) -> list[int]:
    """Blocks of each stage under the case's split."""
    if "+" in case.split:
        return [int(count) for count in case.split.split("+")]
    costs = LayerCosts(0.0, 0.0) if case.split == "even" else place.costs[case.config, case.b]
    return layers_per_stage(CONFIGS[case.config].layers, placed, costs)


def own_pieces(case: Case, place: Place, *, stages_per_rank: int, style: str) -> tuple[list[int], dict[int, Piece]]:
    """Blocks of every stage, and this rank's pieces by stage."""
    placed = placement(place.ranks, stages_per_rank, style)
    counts = layer_counts(case, place, placed)
    own = {index: piece for index, piece in enumerate(pieces(counts)) if placed[index] == place.rank}
    return counts, own
