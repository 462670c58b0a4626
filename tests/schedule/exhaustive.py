"""The best cost over all orders of a tiny pipeline, found by trying every one; shares no code with the planner.

Times and sizes are whole numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from zbfx.plan import CostTable

Word = tuple[tuple[str, int, int], ...]  # (kind, stage, microbatch)


def words(stages: tuple[int, ...], microbatches: int, costs: CostTable, limit: int | None) -> Iterator[Word]:
    """Every order of one rank in which each stage's kinds run in order and memory stays within `limit`."""

    def extend(word: Word, done: dict[tuple[str, int], int], held: int) -> Iterator[Word]:
        if len(word) == 3 * len(stages) * microbatches:
            yield word
            return
        for stage in stages:
            saved = int(costs.stages[stage].saved_bytes)
            weight_saved = int(costs.stages[stage].weight_saved_bytes)
            for kind, before, change in (
                ("F", None, saved),
                ("B", "F", weight_saved - saved),
                ("W", "B", -weight_saved),
            ):
                index = done[kind, stage]
                if index == microbatches or (before is not None and done[before, stage] <= index):
                    continue
                if limit is not None and held + change > limit:
                    continue
                yield from extend((*word, (kind, stage, index)), done | {(kind, stage): index + 1}, held + change)

    yield from extend((), {(kind, stage): 0 for kind in "FBW" for stage in stages}, 0)


def cost_of(ranks: tuple[Word, ...], costs: CostTable) -> int | None:
    """The paper's cost by plain relaxation of all constraints, or None where they are circular."""
    seconds = {
        action: int(getattr(costs.stages[action[1]], name))
        for word in ranks
        for action in word
        for kind, name in (("F", "forward_s"), ("B", "backward_input_s"), ("W", "backward_weight_s"))
        if action[0] == kind
    }
    arcs: list[tuple[tuple[str, int, int], tuple[str, int, int], int]] = []
    for word in ranks:
        arcs += [(one, other, 0) for one, other in pairwise(word)]
    microbatches = 1 + max(action[2] for action in seconds)
    for edge, j in product(costs.edges, range(microbatches)):
        local = costs.placement[edge.source] == costs.placement[edge.target]
        if edge.forward_s is not None:
            lag = 0 if local else int(edge.forward_s)
            arcs.append((("F", edge.source, j), ("F", edge.target, j), lag))
        if edge.backward_s is not None:
            lag = 0 if local else int(edge.backward_s)
            arcs.append((("B", edge.target, j), ("B", edge.source, j), lag))
    start = dict.fromkeys(seconds, 0)
    for _ in range(len(seconds) + 1):
        changed = False
        for one, other, lag in arcs:
            ready = start[one] + seconds[one] + lag
            if ready > start[other]:
                start[other], changed = ready, True
        if not changed:
            return max(start[word[-1]] + seconds[word[-1]] - start[word[0]] for word in ranks)
    return None


def best_cost(costs: CostTable, microbatches: int, limit: int | None) -> int:
    """The least cost of all combinations of orders."""
    choices = [list(words(costs.stages_of(rank), microbatches, costs, limit)) for rank in range(costs.rank_count)]
    found = [cost_of(ranks, costs) for ranks in product(*choices)]
    return min(cost for cost in found if cost is not None)
