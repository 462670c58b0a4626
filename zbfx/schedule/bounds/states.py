"""What a rank can have done at some moment: the states between which its actions lead.

Takes   a `ChainPipeline`.
Gives   `RankStates`: the states of all ranks as flat arrays, and which action leads from which to which.
Raises  nothing; None where there are too many.
Source  ours.

Kinds run in order of microbatches, so how many of each it has finished says what a rank has done. On a rank with one
stage these are its Fs, Bs and Ws: a >= b >= c. On a rank with stages s < t they are its F_s, F_t, B_t and B_s, likewise
from most to fewest: a microbatch passes them in this order. The Ws of such a rank are not counted, they only take time.
The Ws that memory asks for come before a state, those whose B is still to come after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from zbfx.schedule.bounds.chain import ChainPipeline
from zbfx.timing.exact import B, F, W

Ints = NDArray[np.int64]

MOST_STATES = 1_500_000
EXACT = 1 << 62  # products up to here are whole numbers
ROUNDED = 1 - 1e-12  # of a floating-point time; rounds it down for certain


@dataclass(frozen=True)
class RankStates:
    """`entered_from[k]`: the state before the k-th kind of a rank led here, `entered_by[k]` the action that did, with
    index (kind * S + stage) * m + microbatch; the numbers of states and of actions stand for none. Sorted by the number
    of actions behind them, `wave` says where each number begins. `spent`: ticks that the rank has worked at least,
    `left`: that it still has to. `initial`, `final`: per rank."""

    rank: Ints
    entered_from: Ints
    entered_by: Ints
    wave: Ints
    spent: Ints
    left: Ints
    initial: Ints
    final: Ints


def letters(pipe: ChainPipeline, rank: int) -> list[tuple[int, int]]:
    """The kinds, with their stages, that tell the states of a rank apart, from most to fewest."""
    stages = pipe.stages_of(rank)
    if len(stages) == 1:
        return [(kind, stages[0]) for kind in (F, B, W)]
    return [(F, stage) for stage in stages] + [(B, stage) for stage in reversed(stages)]


def rank_states(pipe: ChainPipeline) -> RankStates | None:
    """None where there are more than `MOST_STATES`."""
    m, count, ranks = pipe.microbatches, len(pipe.stages), range(pipe.rank_count)
    width = max(len(letters(pipe, rank)) for rank in ranks)
    nothing = 3 * count * m
    parts = []
    first = 0
    for rank in ranks:
        ahead = leads(pipe, rank)
        if ahead is None or first + len(ahead) * (m + 1) > 4 * MOST_STATES:
            return None
        parts.append(_states_of(pipe, rank, ahead, width, first, nothing))
        first += len(ahead) * (m + 1)
    columns = [np.concatenate([part[name] for part in parts], axis=-1) for name in range(len(parts[0]))]
    rank_of, total, spent, left, valid, origin, action = columns
    kept = np.flatnonzero(valid)
    if len(kept) > MOST_STATES:
        return None
    kept = kept[np.argsort(total[kept], kind="stable")]
    index = np.full(first + 1, len(kept), dtype=np.int64)
    index[kept] = np.arange(len(kept))
    total = total[kept]
    origin = index[origin[:, kept]]
    starts = total == 0
    return RankStates(
        rank=rank_of[kept],
        entered_from=origin,
        entered_by=np.where(origin < len(kept), action[:, kept], nothing),
        wave=np.searchsorted(total, np.arange(total[-1] + 2)),
        spent=spent[kept],
        left=left[kept],
        initial=np.flatnonzero(starts)[np.argsort(rank_of[kept][starts])],
        final=np.array([np.flatnonzero((rank_of[kept] == rank) & (left[kept] == 0))[-1] for rank in ranks]),
    )


def leads(pipe: ChainPipeline, rank: int) -> Ints | None:
    """Every way in which a rank's kinds can be ahead of the last of them within its memory: one row each, a column per
    kind. None where there are too many."""
    m, kinds = pipe.microbatches, letters(pipe, rank)
    limit = None if pipe.limits is None else pipe.limits[rank]
    rows = np.zeros((1, 1), dtype=np.int64)
    for _ in kinds[1:]:  # from the last kind to the first
        highest = rows[:, 0]
        repeats = m - highest + 1
        if repeats.sum() > 2 * MOST_STATES:
            return None
        owner = np.repeat(np.arange(len(rows)), repeats)
        step = np.arange(len(owner)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        rows = np.column_stack([highest[owner] + step, rows[owner]])
        if limit is not None:
            rows = rows[_held_ahead(pipe, kinds, rows) <= limit]
    return rows


def _held_ahead(pipe: ChainPipeline, kinds: list[tuple[int, int]], rows: Ints) -> Ints:
    """Least memory that the rank holds when the last kinds are ahead as `rows` say; kinds before those count as far as
    they must be ahead, too."""
    size = rows.shape[1]
    known = {kind: rows[:, column] for column, kind in enumerate(kinds[-size:])}
    held = np.zeros(len(rows), dtype=np.int64)
    for kind, stage in kinds:
        ahead = known.get((kind, stage), rows[:, 0])
        if kind == F:
            held += (ahead - known.get((B, stage), rows[:, 0])) * pipe.saved[stage]
        elif kind == W:
            held += (known.get((B, stage), rows[:, 0]) - ahead) * pipe.weight_saved[stage]
    return held


def _states_of(
    pipe: ChainPipeline, rank: int, ahead: Ints, width: int, first: int, nothing: int
) -> tuple[Ints, Ints, Ints, Ints, NDArray[np.bool_], Ints, Ints]:
    """The states of one rank: a row of `ahead` for every number of the last kind, numbered from `first`. Some lie
    beyond the last microbatch; those are not valid."""
    m, count, kinds = pipe.microbatches, len(pipe.stages), letters(pipe, rank)
    rows, last = len(ahead), len(kinds) - 1
    size = rows * (m + 1)
    base = np.repeat(np.arange(m + 1), rows)
    done = np.tile(ahead, (m + 1, 1)) + base[:, None]
    valid = done[:, 0] <= m
    origin = np.full((width, size), -1, dtype=np.int64)
    action = np.full((width, size), nothing, dtype=np.int64)
    find = _Finder(ahead, m)
    row = np.tile(np.arange(rows), m + 1)
    for column, (kind, stage) in enumerate(kinds):
        step = np.zeros(last + 1, dtype=np.int64)
        step[column] = -1
        before = find.rows(ahead + step - step[last])[row]
        found = (before >= 0) & (done[:, column] > 0)
        origin[column] = np.where(found, first + (base + step[last]) * rows + before, -1)
        action[column] = (kind * count + stage) * m + np.maximum(done[:, column] - 1, 0)
    times = {F: pipe.forward, B: pipe.backward, W: pipe.weight}
    spent = sum(
        (done[:, column] * times[kind][stage] for column, (kind, stage) in enumerate(kinds)), np.zeros_like(base)
    )
    left = sum(
        ((m - done[:, column]) * times[kind][stage] for column, (kind, stage) in enumerate(kinds)), np.zeros_like(base)
    )
    if kinds[last][0] == B:
        returned = {stage: done[:, column] for column, (kind, stage) in enumerate(kinds) if kind == B}
        for stage, number in returned.items():
            left = left + (m - number) * pipe.weight[stage]
        if pipe.limits is not None:
            spent = spent + _ws_for_memory(pipe, rank, _held_ahead(pipe, kinds, done), returned)
    return np.full(size, rank), done.sum(axis=1), spent, left, valid, origin, action


class _Finder:
    """Finds rows of a table."""

    def __init__(self, table: Ints, most: int) -> None:
        self.factors = (most + 3) ** np.arange(table.shape[1])
        keys = table @ self.factors
        self.order = np.argsort(keys)
        self.keys = keys[self.order]

    def rows(self, wanted: Ints) -> Ints:
        """Where each row of `wanted` stands; -1 for none."""
        keys = wanted @ self.factors
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        ordered = (wanted >= 0).all(axis=1) & np.logical_and.reduce(
            [wanted[:, one] >= wanted[:, other] for one, other in pairwise(range(wanted.shape[1]))]
        )
        return np.where(ordered & (self.keys[place] == keys), self.order[place], -1)


def _ws_for_memory(pipe: ChainPipeline, rank: int, in_flight: Ints, returned: dict[int, Ints]) -> Ints:
    """Least ticks of Ws that must have run for the rest to fit beside `in_flight`: those that free most in least time
    first, parts of one allowed."""
    assert pipe.limits is not None
    over = in_flight - pipe.limits[rank]
    for stage, number in returned.items():
        over = over + number * pipe.weight_saved[stage]
    spent = np.zeros_like(over)
    freeing = [stage for stage in returned if pipe.weight_saved[stage] > 0]
    for stage in sorted(freeing, key=lambda s: pipe.weight[s] / pipe.weight_saved[s]):
        size, time = pipe.weight_saved[stage], pipe.weight[stage]
        freed = np.clip(over, 0, returned[stage] * size)
        if int(freed.max(initial=0)) * time < EXACT:
            spent += -(-freed * time // size)
        else:
            spent += (freed * (time / size) * ROUNDED).astype(np.int64)
        over = over - freed
    return spent
