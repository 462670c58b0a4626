"""The loop of `annealing.py`, compiled by numba: importing it needs numba.

Takes   words as arrays of groups, a row per rank, and the problem as arrays.
Gives   the words changed in place, the best of them.
Raises  nothing. Source: ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

SHORTEST, MEAN_DISTANCE = 1, 3.0  # places that a letter moves
SPREAD = 0.05  # what the mean of all ranks' times counts beside the longest


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
def longest_span(
    words: Any, lengths: Any, m: Any, ticks: Any, first_source: Any, sources: Any, lags: Any, work: Any
) -> Any:
    """The longest rank's ticks, and those of all ranks together; -1 where the words are no order or deadlock. `work`:
    scratch, as `Annealing` makes it."""
    ends, waiting, done, clock, place, begun, following, stack = work
    p, count = len(lengths), len(ticks) // 4
    for code in range(len(ends)):
        ends[code] = -1
        waiting[code] = -1
    for group in range(len(done)):
        done[group] = 0
    left = 0
    for rank in range(p):
        clock[rank] = 0
        place[rank] = 0
        stack[rank] = p - 1 - rank
        left += lengths[rank]
    top = p
    while top > 0:
        top -= 1
        rank = stack[top]
        now, x = clock[rank], place[rank]
        while x < lengths[rank]:
            group = words[rank, x]
            kind = group // count
            stage = group - kind * count
            if kind == 2:
                if done[group] >= done[count + stage]:
                    return -1, 0
                done[group] += 1
                now += ticks[group]
            else:
                output = stage if kind == 0 else count + stage
                j = done[output]
                if kind > 0 and j >= done[stage]:
                    return -1, 0
                start = now
                missing = -1
                for edge in range(first_source[output], first_source[output + 1]):
                    needed = sources[edge] * m + j
                    if ends[needed] < 0:
                        missing = needed
                        break
                    if ends[needed] + lags[edge] > start:
                        start = ends[needed] + lags[edge]
                if missing >= 0:
                    following[rank] = waiting[missing]
                    waiting[missing] = rank
                    break
                if x == 0:
                    begun[rank] = start
                now = start + ticks[group]
                done[output] = j + 1
                if kind == 3:
                    done[2 * count + stage] += 1
                made = output * m + j
                ends[made] = now
                other = waiting[made]
                while other >= 0:
                    stack[top] = other
                    top += 1
                    other = following[other]
            x += 1
            left -= 1
        clock[rank], place[rank] = now, x
    if left > 0:
        return -1, 0
    most = total = 0
    for rank in range(p):
        span = clock[rank] - begun[rank]
        total += span
        if span > most:
            most = span
    return most, total


@njit(cache=True)
def changed(word: Any, length: Any, count: Any, fusable: Any, state: Any) -> Any:
    """A random change of one rank's word, in place: its new length, -1 where nothing changed."""
    a = int(next_random(state) * length)
    group = word[a]
    kind, stage = group // count, group % count
    if (kind == 3 or (kind == 1 and fusable[stage])) and next_random(state) < 0.25:
        if kind == 3:
            for x in range(length, a + 1, -1):
                word[x] = word[x - 1]
            word[a] = count + stage
            word[a + 1] = 2 * count + stage
            return length + 1
        found = a
        for x in range(a + 1, length):
            if found > a:
                word[x - 1] = word[x]
            elif word[x] == 2 * count + stage:
                found = x
        if found == a:
            return -1
        word[a] = 3 * count + stage
        return length - 1
    distance = SHORTEST + int(-np.log(1.0 - next_random(state)) * MEAN_DISTANCE)
    b = a + distance if next_random(state) < 0.5 else a - distance
    if b < 0 or b >= length:
        return -1
    step = 1 if b > a else -1
    same = True
    x = a
    while x != b:
        word[x] = word[x + step]
        same = same and word[x] == group
        x += step
    word[b] = group
    return -1 if same else length


@njit(cache=True)
def anneal(
    words: Any,
    lengths: Any,
    m: Any,
    ticks: Any,
    grows: Any,
    limits: Any,
    first_source: Any,
    sources: Any,
    lags: Any,
    fusable: Any,
    state: Any,
    work: Any,
    best: Any,
    best_lengths: Any,
    best_cost: Any,
    target: Any,
    hot: Any,
    cold: Any,
    steps: Any,
) -> Any:
    """`steps` random changes, from temperature `hot` to `cold`; stops at cost `target`. Gives the best cost."""
    p, count = len(lengths), len(ticks) // 4
    before = np.empty_like(words[0])
    cooling = np.log(cold / hot) / steps
    cost, total = longest_span(words, lengths, m, ticks, first_source, sources, lags, work)
    energy = cost + SPREAD * total / p
    for step in range(steps):
        rank = int(next_random(state) * p)
        word, length = words[rank], lengths[rank]
        for x in range(length):
            before[x] = word[x]
        after = changed(word, length, count, fusable, state)
        held = 0
        for x in range(after):
            held += grows[word[x]]
            if held > limits[rank]:
                after = -1
                break
        if after >= 0:
            lengths[rank] = after
            cost, total = longest_span(words, lengths, m, ticks, first_source, sources, lags, work)
            if cost >= 0:
                found = cost + SPREAD * total / p
                if found <= energy or next_random(state) < np.exp((energy - found) / (hot * np.exp(cooling * step))):
                    energy = found
                    if cost < best_cost:
                        best_cost = cost
                        for other in range(p):
                            best_lengths[other] = lengths[other]
                            for x in range(lengths[other]):
                                best[other, x] = words[other, x]
                        if cost <= target:
                            break
                    continue
        for x in range(length):
            word[x] = before[x]
        lengths[rank] = length
    return best_cost
