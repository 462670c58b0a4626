"""List scheduling by a rule, compiled by numba: importing it needs numba.

Takes   one problem and one rule as arrays.
Gives   the orders, and their cost; -1 where the rule gets stuck or costs too much.
Raises  nothing. Source: section 3.1 of the paper; event for event what `list_scheduling.py` does.

`lists` is a plain tuple of arrays, for what numba keeps on disk must not name classes that a later version lacks:
microbatches; ticks, grows per group; room per stage; limits, work (ticks) per rank; first_stage, stages: the stages of
rank r begin at first_stage[r]; first_source, sources, source_lags by group, and first_receiver, receivers,
receiver_lags, which are ranks. `choices` are the fields of a `Rule`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from zbfx.timing.exact import B, W

NOT_KNOWN = 1 << 62
LATER, FEWEST, EARLIER, GROUPED = range(4)  # values of `Turn`
UNIT = 4  # PATIENCE_UNIT: plain numbers are constants for numba


@njit(cache=True)
def pushed(heap: Any, size: Any, key: Any) -> Any:
    """The heap with one more than its `size` keys: itself, or a larger copy."""
    if size == len(heap):
        larger = np.empty(2 * size, np.int64)
        for at in range(size):
            larger[at] = heap[at]
        heap = larger
    at = size
    while at > 0 and heap[(at - 1) // 2] > key:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = key
    return heap


@njit(cache=True)
def popped(heap: Any, size: Any) -> Any:
    """The least of `size` keys, which leaves the heap."""
    least, key = heap[0], heap[size - 1]
    at, below = 0, 1
    while below < size - 1:
        if below + 1 < size - 1 and heap[below + 1] < heap[below]:
            below += 1
        if heap[below] >= key:
            break
        heap[at] = heap[below]
        at, below = below, 2 * below + 1
    heap[at] = key
    return least


@njit(cache=True)
def arrival(lists: Any, ends: Any, done: Any, group: Any) -> Any:
    """When the inputs of a group's next action are there, as far as known."""
    _, _, _, _, _, _, _, _, first_source, sources, source_lags, _, _, _ = lists
    latest = 0
    for edge in range(first_source[group], first_source[group + 1]):
        source = sources[edge]
        if done[group] >= done[source]:
            return NOT_KNOWN
        latest = max(latest, ends[source, done[group]] + source_lags[edge])
    return latest


@njit(cache=True)
def chosen(lists: Any, choices: Any, ends: Any, done: Any, held: Any, last_kind: Any, rank: Any, now: Any) -> Any:
    """The group that `rank` runs next, or -1 to wait."""
    m, ticks, grows, room, limits, _, first_stage, stages, _, _, _, _, _, _ = lists
    p, count = len(limits), len(room)
    hold, cap, patience, alternate, recycle, turn = choices
    allowed = limits[rank] - held[rank]
    next_arrival = NOT_KNOWN
    forward = backward = weight = -1
    finished, blocked = True, False
    for place in range(first_stage[rank], first_stage[rank + 1]):
        stage = stages[place]
        started, returned = done[stage], done[B * count + stage]
        if returned < m:
            finished = False
            group = B * count + stage
            if started > returned and started >= hold[stage] and grows[group] <= allowed:
                at = arrival(lists, ends, done, group)
                if at > now:
                    next_arrival = min(next_arrival, at)
                elif (
                    backward < 0
                    or turn[rank] == EARLIER
                    or (turn[rank] == FEWEST and returned < done[backward])
                    or (turn[rank] == GROUPED and returned // p < done[backward] // p)
                ):
                    backward = group
            if started < m and (started - returned < cap[stage] or started < hold[stage]):
                at = arrival(lists, ends, done, stage)
                if room[stage] > allowed:
                    blocked = blocked or at <= now
                elif at > now:
                    next_arrival = min(next_arrival, at)
                elif (
                    forward < 0
                    or turn[rank] == EARLIER
                    or (turn[rank] == FEWEST and started < done[forward])
                    or (turn[rank] == GROUPED and started // p <= done[forward] // p)
                ):
                    forward = stage
        if done[W * count + stage] < returned and weight < 0:
            weight = W * count + stage
    if blocked and forward < 0 and weight >= 0 and recycle[rank]:
        return weight
    if backward >= 0 and not (forward >= 0 and alternate[rank] and last_kind[rank] == B):
        return backward
    if forward >= 0:
        return forward
    if weight >= 0 and (
        finished or next_arrival == NOT_KNOWN or UNIT * (next_arrival - now) >= patience[rank] * ticks[weight]
    ):
        return weight
    return -1


@njit(cache=True)
def rule_listed(lists: Any, choices: Any, stop_at: Any, orders: Any, lengths: Any) -> Any:
    """Fills `orders`, a row of codes per rank, and `lengths`. Gives the cost in ticks, -1 where the rule gets stuck or
    costs `stop_at` or more."""
    m, ticks, grows, room, limits, work, _, _, _, _, _, first_receiver, receivers, receiver_lags = lists
    p, count = len(limits), len(room)
    ends = np.zeros((W * count, m), np.int64)
    done, held, last_kind = np.zeros(3 * count, np.int64), np.zeros(p, np.int64), np.zeros(p, np.int64)
    clocks, first, spare = np.zeros(p, np.int64), np.full(p, -1), np.zeros(p, np.int64)
    heap = np.empty(4 * p, np.int64)
    for rank in range(p):
        spare[rank] = stop_at - work[rank]
        heap[rank] = rank  # the key of time t and rank r is t * p + r
    size, left = p, 3 * count * m
    while size > 0:
        key = popped(heap, size)
        size -= 1
        now, rank = key // p, key % p
        if clocks[rank] > now:
            continue
        group = chosen(lists, choices, ends, done, held, last_kind, rank, now)
        if group < 0:
            continue
        if first[rank] < 0:
            first[rank] = now
        else:
            spare[rank] -= now - clocks[rank]
        if spare[rank] <= 0:
            return -1
        end = now + ticks[group]
        clocks[rank] = end
        orders[rank, lengths[rank]] = group * m + done[group]
        lengths[rank] += 1
        held[rank] += grows[group]
        if group < W * count:
            ends[group, done[group]] = end
            last_kind[rank] = group // count
            for edge in range(first_receiver[group], first_receiver[group + 1]):
                heap = pushed(heap, size, (end + receiver_lags[edge]) * p + receivers[edge])
                size += 1
        done[group] += 1
        left -= 1
        heap = pushed(heap, size, end * p + rank)
        size += 1
    if left > 0:
        return -1
    cost = 0
    for rank in range(p):
        cost = max(cost, clocks[rank] - max(first[rank], 0))
    return cost


@njit(cache=True)
def orders_timed(lists: Any, codes: Any, begins: Any) -> Any:
    """The cost of given orders in ticks: rank r runs `codes` from begins[r] to begins[r + 1]. -1 where they deadlock or
    exceed the limit."""
    m, ticks, grows, room, limits, _, _, _, first_source, sources, source_lags, _, _, _ = lists
    p, count = len(limits), len(room)
    ends, waiting = np.full(3 * count * m, -1, np.int64), np.full(3 * count * m, -1, np.int32)
    following, runnable = np.full(p, -1, np.int64), np.arange(p)
    clocks, places, first, held = (
        np.zeros(p, np.int64),
        begins[:-1].copy(),
        np.zeros(p, np.int64),
        np.zeros(p, np.int64),
    )
    top = p
    while top > 0:
        top -= 1
        rank = runnable[top]
        while places[rank] < begins[rank + 1]:
            group, j = codes[places[rank]] // m, codes[places[rank]] % m
            start, missing = clocks[rank], -1
            for edge in range(first_source[group], first_source[group + 1]):
                needed = sources[edge] * m + j
                if ends[needed] < 0:
                    missing = needed
                    break
                start = max(start, ends[needed] + source_lags[edge])
            if missing >= 0:
                following[rank] = waiting[missing]
                waiting[missing] = rank
                break
            if places[rank] == begins[rank]:
                first[rank] = start
            held[rank] += grows[group]
            if held[rank] > limits[rank]:
                return -1
            clocks[rank] = start + ticks[group]
            made = (group if group < 3 * count else group - 2 * count) * m + j  # BW has the output of B
            ends[made] = clocks[rank]
            other = waiting[made]
            while other >= 0:
                runnable[top] = other
                top += 1
                other = following[other]
            places[rank] += 1
    cost = 0
    for rank in range(p):
        if places[rank] < begins[rank + 1]:
            return -1
        cost = max(cost, clocks[rank] - first[rank])
    return cost
