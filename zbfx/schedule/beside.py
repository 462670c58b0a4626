"""W beside B: on a device with two streams, the W of one microbatch fills what the B of another leaves idle.

Takes   a schedule whose costs say how long a B takes with a W beside it.
Gives   the schedule with pairs of a W and a B, where that fits the memory limit and ends sooner. A W whose own B has
        ended starts with one of the next Bs of its rank; what it reads is held until that B has ended.
Raises  nothing. Source: ours. A W keeps a GPU's arithmetic busy while a B waits for memory, and the other way round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from zbfx.plan import Action, CostTable, Kind, parts
from zbfx.schedule.schedule import Schedule
from zbfx.timing.simulate import simulate
from zbfx.timing.two_streams import Arrangement, expected, iteration_s, peak_bytes

LAGS = (1, 2, 3)  # how many Bs a W may wait for the one that it runs beside
LARGE = 100_000  # of actions times ranks; above it all ranks are arranged alike
ROUNDING = 1e-9  # sums of the same times in another order


def run_beside(schedule: Schedule, stages: frozenset[int] | None = None, *, move: bool = True) -> Schedule:
    """The schedule with Ws (of `stages`, if given) beside Bs, where that fits its memory limit and ends sooner. `move`
    lets Ws move between the other actions of their rank, which keep their order. So do the Ws of a stage: gradients
    keep their bits. Times and bubbles of the result count actions one after the other, `expected_s` counts them as they
    run, and `peak_bytes` covers both."""
    costs = schedule.costs
    options = [list(arrangements(schedule, rank, stages, move)) for rank in range(costs.rank_count)]
    best = soonest(costs, options)
    pairs = {guest: host for rank in best for guest, host in rank.pairs.items()}
    if not pairs:
        return schedule
    timed = simulate(costs, schedule.microbatches, [rank.order for rank in best])
    peaks = [float(peak_bytes(rank.order, costs, rank.pairs)) for rank in best]
    count = sum(action.kind is Kind.W for rank in best for action in rank.order)
    note = f"{len(pairs)} of {count} Ws run beside a B, on a second stream"
    return replace(
        schedule,
        ranks=tuple(rank.order for rank in best),
        spans=timed.spans,
        beside=tuple(pairs.items()),
        expected_s=iteration_s(expected(costs, best)),
        peak_bytes=tuple(map(max, peaks, timed.peak_bytes)),
        notes=(*schedule.notes, note),
    )


def arrangements(schedule: Schedule, rank: int, stages: frozenset[int] | None, move: bool) -> Iterator[Arrangement]:
    """The rank's order as it is, and with Ws beside Bs in each way that its memory limit allows."""
    limit = None if schedule.mem_limit is None else schedule.mem_limit[rank]
    order = tuple(part for action in schedule.ranks[rank] for part in parts(action))
    yield Arrangement(order, {})
    found = [moved(order, lag, stages) for lag in LAGS] if move else [in_place(order, stages)]
    for arrangement in found:
        if weight_orders(arrangement.order) != weight_orders(order):
            continue
        if limit is None or peak_bytes(arrangement.order, schedule.costs, arrangement.pairs) <= limit:
            yield arrangement


def in_place(order: Sequence[Action], stages: frozenset[int] | None) -> Arrangement:
    """The order as it is: every W right before a B runs beside that B."""
    pairs = {
        action: after
        for action, after in pairwise(order)
        if action.kind is Kind.W and after.kind is Kind.B and (stages is None or action.stage in stages)
    }
    return Arrangement(tuple(order), pairs)


def moved(order: Sequence[Action], lag: int, stages: frozenset[int] | None) -> Arrangement:
    """Every W beside the B that comes `lag` Bs after its own; the last `lag` Ws at the end."""
    ready: deque[Action] = deque()  # Ws whose B has run
    found: list[Action] = []
    pairs: dict[Action, Action] = {}
    for action in order:
        if action.kind is Kind.B:
            if len(ready) == lag:
                found.append(ready.popleft())
                if stages is None or found[-1].stage in stages:
                    pairs[found[-1]] = action
            ready.append(Action(Kind.W, action.stage, action.microbatch))
        if action.kind is not Kind.W:
            found.append(action)
    return Arrangement((*found, *ready), pairs)


def weight_orders(order: Sequence[Action]) -> dict[int, list[int]]:
    """The microbatches of each stage's Ws, in the order in which their gradients are added."""
    found: dict[int, list[int]] = {}
    for action in order:
        if action.kind is Kind.W:
            found.setdefault(action.stage, []).append(action.microbatch)
    return found


def soonest(costs: CostTable, options: Sequence[Sequence[Arrangement]]) -> list[Arrangement]:
    """One arrangement per rank: the best of those in which all ranks wait alike, then improved rank by rank."""

    def seconds(choice: Sequence[Arrangement]) -> float:
        return iteration_s(expected(costs, choice))

    alike = [[rank[min(k, len(rank) - 1)] for rank in options] for k in range(max(map(len, options)))]
    best = min(alike, key=seconds)
    best_s = seconds(best)
    if sum(len(rank.order) for rank in best) * len(options) > LARGE:
        return best
    for rank, others in enumerate(options):
        for other in others:
            changed = [*best[:rank], other, *best[rank + 1 :]]
            changed_s = seconds(changed)
            if changed_s < best_s * (1 - ROUNDING):
                best, best_s = changed, changed_s
    return best
