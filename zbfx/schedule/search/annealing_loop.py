"""The loop of `annealing.py`, compiled by numba: importing it needs numba.

Takes   words as arrays of groups, a row per rank, and the problem as arrays.
Gives   the words changed in place, the best of them.
Raises  nothing. Source: ours.

Half of the letters that move lie on a longest path: other moves cannot make the longest rank shorter. Whether a change
will be taken is known as soon as some rank has waited too long, and no time before the change is computed again.
One file, for numba does not see that a function of another one has changed since it compiled this one. Arrays come in
plain tuples, for what numba keeps on disk must not name classes that a later version lacks:

task    microbatches; ticks, grows per group; limits per rank; first_source, sources, lags: the sources of group g, an F
        or a B, begin at first_source[g]; placement, fusable per stage
words   per rank and place: the group; [lengths per rank]; the microbatch of an F, B or BW; how many split Bs, or Ws, of
        the stage came before a B, or a W; memory behind it; the rank's ticks of work before it, also before the end, so
        rows have one place more than the longest word
times   starts per rank and place; per output (group of an F or B * m + microbatch) when its action starts, and ends
trial   the times of a change that may not be taken. Starts per rank and place; per output its end, in which step that
        was computed, the rank that waits for it, the first of a chain; per rank the next one of the chain, the place
        from which times are new, how far they are, the clock there, the output that it waits for; a stack of ranks
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from zbfx.timing.exact import BW, B, F, W

SHORTEST, MEAN_DISTANCE = 1, 3.0  # places that a letter moves
SPREAD = 0.1  # what the mean of all ranks' times counts beside the longest
CRITICAL = 0.5  # of the moves: letters of a longest path
TOGGLED = 0.25  # of the moves of a backward that may be fused: it is split, or fused
UNKNOWN = 1 << 60


@njit(cache=True)
def next_random(state: Any) -> Any:
    """A number in [0, 1), by xorshift."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return (x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True)
def row_counted(task: Any, words: Any, rank: Any) -> Any:
    """Count along a rank's whole word. False where it is no order, or exceeds the limit."""
    _, ticks, grows, limits, _, _, _, _, _ = task
    groups, lengths, indexes, singles, held_rows, worked_rows = words
    count = len(ticks) // 4
    word, held, worked = groups[rank], held_rows[rank], worked_rows[rank]
    done, single = np.zeros(3 * count, dtype=np.int64), np.zeros(3 * count, dtype=np.int64)
    memory = work = 0
    for x in range(lengths[rank]):
        group = word[x]
        kind, stage = group // count, group % count
        worked[x] = work
        work += ticks[group]
        memory += grows[group]
        held[x] = memory
        if memory > limits[rank]:
            return False
        if kind == W:
            if single[group] >= single[B * count + stage]:
                return False
        else:
            output = stage if kind == F else B * count + stage
            if kind != F and done[output] >= done[stage]:
                return False
            indexes[rank, x] = done[output]
            done[output] += 1
        singles[rank, x] = single[group] if kind != BW else 0
        if kind != BW:
            single[group] += 1
    worked[lengths[rank]] = work
    return True


@njit(cache=True)
def letter_moved(task: Any, words: Any, rank: Any, a: Any, b: Any) -> Any:
    """The letter at place `a` goes to `b`. False where the word then is no order, or exceeds the limit; it is changed
    all the same. Letters of its stage alone change their numbers."""
    _, ticks, grows, limits, _, _, _, _, _ = task
    groups, _, indexes, singles, held_rows, worked_rows = words
    count, limit = len(ticks) // 4, limits[rank]
    word, index, single = groups[rank], indexes[rank], singles[rank]
    held, worked = held_rows[rank], worked_rows[rank]
    low, high = min(a, b), max(a, b)
    group = word[a]
    stage = group % count
    next_f = next_b = next_single = next_w = UNKNOWN  # where no letter of a kind is passed, its numbers do not matter
    for x in range(low, high + 1):
        if word[x] % count == stage:
            kind = word[x] // count
            if kind == F:
                next_f = min(next_f, index[x])
            elif kind == W:
                next_w = min(next_w, single[x])
            else:
                next_b = min(next_b, index[x])
                if kind == B:
                    next_single = min(next_single, single[x])
    step = 1 if b > a else -1
    for x in range(a, b, step):
        word[x], index[x], single[x] = word[x + step], index[x + step], single[x + step]
    word[b] = group
    memory = held[low - 1] if low > 0 else 0
    work = worked[low]
    for x in range(low, high + 1):
        other = word[x]
        if other % count == stage:
            kind = other // count
            if kind == F:
                index[x] = next_f
                next_f += 1
            elif kind == W:
                if next_w >= next_single:
                    return False
                single[x] = next_w
                next_w += 1
            else:
                if next_b >= next_f:
                    return False
                index[x] = next_b
                next_b += 1
                if kind == B:
                    single[x] = next_single
                    next_single += 1
        memory += grows[other]
        if memory > limit:
            return False
        held[x], worked[x] = memory, work
        work += ticks[other]
    return True


@njit(cache=True)
def toggled(task: Any, words: Any, rank: Any, a: Any) -> Any:
    """The backward at place `a` is split, or fused with the next W of its stage. False as in `letter_moved`, or
    where no W follows."""
    _, ticks, _, _, _, _, _, _, _ = task
    groups, lengths, _, _, _, _ = words
    count = len(ticks) // 4
    word, length = groups[rank], lengths[rank]
    stage = word[a] % count
    if word[a] // count == BW:
        for x in range(length, a + 1, -1):
            word[x] = word[x - 1]
        word[a], word[a + 1] = B * count + stage, W * count + stage
        lengths[rank] = length + 1
        return row_counted(task, words, rank)
    found = a + 1
    while found < length and word[found] != W * count + stage:
        found += 1
    if found == length:
        return False
    for x in range(found, length - 1):
        word[x] = word[x + 1]
    word[a] = BW * count + stage
    lengths[rank] = length - 1
    return row_counted(task, words, rank)


@njit(cache=True)
def first_at(starts: Any, length: Any, time: Any) -> Any:
    """The first of `length` places that starts at `time` or later."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        if starts[middle] < time:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def times_anew(
    task: Any, words: Any, times: Any, trial: Any, step: Any, changed: Any, low: Any, since: Any, most: Any
) -> Any:
    """What starts at `since` or later, anew: the longest rank's ticks, and those of all ranks together. -1 where the
    words deadlock or some rank takes more than `most`. Rank `changed` is as it was before place `low`."""
    m, ticks, _, _, first_source, sources, lags, _, _ = task
    groups, lengths, indexes, _, _, worked_rows = words
    old_starts, start_of, end_of = times
    starts, ends, stamps, waiting, following, first, places, clocks, blocked, runnable = trial
    p, count = len(lengths), len(ticks) // 4
    left = 0
    for rank in range(p):
        x = first_at(old_starts[rank], low if rank == changed else lengths[rank], since) if since > 0 else 0
        first[rank] = places[rank] = x
        clocks[rank] = old_starts[rank, x - 1] + ticks[groups[rank, x - 1]] if x > 0 else 0
        runnable[rank] = p - 1 - rank
        left += lengths[rank] - x
    blocked[:] = -1
    top, late = p, False
    while top > 0 and not late:
        top -= 1
        rank = runnable[top]
        now, x, length = clocks[rank], places[rank], lengths[rank]
        begun = starts[rank, 0] if first[rank] == 0 else old_starts[rank, 0]
        spare = most - worked_rows[rank, length]
        blocked[rank] = -1
        while x < length:
            group = groups[rank, x]
            output = group if group < W * count else group - 2 * count  # BW has its B's; a W has none
            start, missing = now, -1
            if group // count != W:
                j = indexes[rank, x]
                for edge in range(first_source[output], first_source[output + 1]):
                    needed = sources[edge] * m + j
                    if stamps[needed] == step:
                        end = ends[needed]
                    elif start_of[needed] < since:
                        end = end_of[needed]
                    else:
                        missing = needed
                        break
                    start = max(start, end + lags[edge])
                if missing >= 0:
                    following[rank], waiting[missing] = waiting[missing], rank
                    blocked[rank] = missing
                    break
                if x == 0:
                    begun = start
                if start - begun - worked_rows[rank, x] > spare:
                    late = True
                    break
                made = output * m + j
                ends[made] = start + ticks[group]
                stamps[made] = step
                other = waiting[made]
                waiting[made] = -1
                while other >= 0:
                    runnable[top] = other
                    top += 1
                    other = following[other]
            starts[rank, x] = start
            now = start + ticks[group]
            x += 1
            left -= 1
        clocks[rank], places[rank] = now, x
    if late or left > 0:
        for rank in range(p):
            if blocked[rank] >= 0:
                waiting[blocked[rank]] = -1
        return -1, 0
    longest = total = 0
    for rank in range(p):
        begun = starts[rank, 0] if first[rank] == 0 else old_starts[rank, 0]
        total += clocks[rank] - begun
        longest = max(longest, clocks[rank] - begun)
    return longest, total


@njit(cache=True)
def times_taken(task: Any, words: Any, times: Any, trial: Any) -> Any:
    """The times of the trial are those of the words."""
    m, ticks, _, _, _, _, _, _, _ = task
    groups, lengths, indexes, _, _, _ = words
    starts, start_of, end_of = times
    new_starts, _, _, _, _, first, _, _, _, _ = trial
    count = len(ticks) // 4
    for rank in range(len(lengths)):
        for x in range(first[rank], lengths[rank]):
            start, group = new_starts[rank, x], groups[rank, x]
            starts[rank, x] = start
            if group // count != W:
                made = (group if group < W * count else group - 2 * count) * m + indexes[rank, x]
                start_of[made], end_of[made] = start, start + ticks[group]


@njit(cache=True)
def longest_path(task: Any, words: Any, times: Any, state: Any, path: Any) -> Any:
    """One longest path from its end on, as rows (rank, place) of `path`: how many there are."""
    m, ticks, _, _, first_source, sources, lags, placement, _ = task
    groups, lengths, indexes, _, _, _ = words
    starts, start_of, end_of = times
    count = len(ticks) // 4
    rank, longest = 0, -1
    for other in range(len(lengths)):
        x = lengths[other] - 1
        span = starts[other, x] + ticks[groups[other, x]] - starts[other, 0]
        if span > longest:
            longest, rank = span, other
    x, size = lengths[rank] - 1, 0
    while size < len(path):
        path[size, 0], path[size, 1] = rank, x
        size += 1
        start, group = starts[rank, x], groups[rank, x]
        local = x > 0 and starts[rank, x - 1] + ticks[groups[rank, x - 1]] == start
        source = -1
        if group // count != W and not (local and next_random(state) < 0.5):
            output = group if group < W * count else group - 2 * count
            for edge in range(first_source[output], first_source[output + 1]):
                needed = sources[edge] * m + indexes[rank, x]
                elsewhere = placement[sources[edge] % count] != rank
                if elsewhere and end_of[needed] + lags[edge] == start:
                    source = needed
        if source >= 0:
            rank = placement[source // m % count]
            x = first_at(starts[rank], lengths[rank], start_of[source])
            while groups[rank, x] // count == W or not (
                groups[rank, x] % (2 * count) == source // m and indexes[rank, x] == source % m
            ):
                x += 1
        elif local:
            x -= 1
        else:
            break
    return size


@njit(cache=True)
def row_copied(words: Any, rank: Any, low: Any, high: Any, kept: Any) -> Any:
    groups, _, indexes, singles, held_rows, worked_rows = words
    for x in range(low, high):
        kept[0, x], kept[1, x] = groups[rank, x], indexes[rank, x]
        kept[2, x], kept[3, x], kept[4, x] = singles[rank, x], held_rows[rank, x], worked_rows[rank, x]


@njit(cache=True)
def row_restored(words: Any, rank: Any, low: Any, high: Any, kept: Any) -> Any:
    groups, _, indexes, singles, held_rows, worked_rows = words
    for x in range(low, high):
        groups[rank, x], indexes[rank, x] = kept[0, x], kept[1, x]
        singles[rank, x], held_rows[rank, x], worked_rows[rank, x] = kept[2, x], kept[3, x], kept[4, x]


@njit(cache=True)
def anneal(
    task: Any,
    words: Any,
    times: Any,
    trial: Any,
    state: Any,
    best: Any,
    best_lengths: Any,
    best_cost: Any,
    target: Any,
    hot: Any,
    cold: Any,
    steps: Any,
) -> Any:
    """`steps` random changes, from temperature `hot` to `cold`; stops at cost `target`. Gives the best cost."""
    _, ticks, _, _, _, _, _, _, fusable = task
    groups, lengths, _, _, _, worked_rows = words
    starts, start_of, _ = times
    _, _, stamps, _, _, _, _, _, _, _ = trial
    p, count, size = len(lengths), len(ticks) // 4, groups.shape[1]
    kept = np.zeros((5, size), np.int64)
    path = np.zeros((4 * size, 2), np.int64)
    path_size = work = 0
    stamps[:] = -1
    start_of[:] = UNKNOWN  # no time is known yet
    for rank in range(p):
        row_counted(task, words, rank)
        work += worked_rows[rank, lengths[rank]]
    none = np.int64(0)  # plain numbers would have all compiled once more
    cost, total = times_anew(task, words, times, trial, none, none, none, none, np.int64(UNKNOWN))
    times_taken(task, words, times, trial)
    energy = cost + SPREAD * total / p
    cooling = np.log(cold / hot) / steps
    for step in range(1, steps + 1):
        if next_random(state) < CRITICAL:
            if path_size == 0:
                path_size = longest_path(task, words, times, state, path)
            x = int(next_random(state) * path_size)
            rank, a = path[x, 0], path[x, 1]
        else:
            rank = int(next_random(state) * p)
            a = int(next_random(state) * lengths[rank])
        word, length = groups[rank], lengths[rank]
        kind, stage = word[a] // count, word[a] % count
        toggles = kind == BW or (kind == B and fusable[stage])
        if toggles and next_random(state) < TOGGLED:
            low, first, last = a, none, length + 1
            row_copied(words, rank, first, last, kept)
            fits = toggled(task, words, rank, a)
            worked = work + worked_rows[rank, lengths[rank]] - kept[4, length]
        else:
            distance = SHORTEST + int(-np.log(1.0 - next_random(state)) * MEAN_DISTANCE)
            b = a + distance if next_random(state) < 0.5 else a - distance
            if b < 0 or b >= length:
                continue
            low, first, last = min(a, b), min(a, b), max(a, b) + 1
            same = True
            for x in range(first, last):
                same = same and word[x] == word[a]
            if same:
                continue
            row_copied(words, rank, first, last, kept)
            fits = letter_moved(task, words, rank, a, b)
            worked = work
        if fits:
            # A change is taken where the energy rises by no more than a random number, larger while it is hot.
            allowed = energy - hot * np.exp(cooling * step) * np.log(1.0 - next_random(state))
            since = starts[rank, low - 1] + ticks[word[low - 1]] if low > 0 else 0
            most = int(allowed - SPREAD * worked / p)
            cost, total = times_anew(task, words, times, trial, step, rank, low, since, most)
            if cost >= 0 and cost + SPREAD * total / p <= allowed:
                times_taken(task, words, times, trial)
                energy, work, path_size = cost + SPREAD * total / p, worked, 0
                if cost < best_cost:
                    best_cost = cost
                    for other in range(p):
                        best_lengths[other] = lengths[other]
                        for x in range(lengths[other]):
                            best[other, x] = groups[other, x]
                    if cost <= target:
                        break
                continue
        lengths[rank] = length
        row_restored(words, rank, first, last, kept)
    return best_cost
