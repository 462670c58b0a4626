"""A lower bound on a step of unlike microbatches.

Takes   costs.
Gives   seconds that the rank which takes longest needs, from its first action to its last, in any order.
Raises  nothing. Source: ours; `tests/schedule/test_unlike.py` compares it with all orders of small problems.

A rank works for all microbatches. And a microbatch L has a way, from its F on a stage s up to the last stage and back.
Take another microbatch k, and where its F and B on s lie:
- its F runs before L's, or its B after L's: that adds seconds before or after the way,
- else its F comes after L's, and its B before. If its F overtakes L's on some stage up to J, L waits for it there. If
  L's B is ahead of its on J and behind it on s, L waits likewise. Else both its F and its B run on J while L is beyond
  J, or while L waits.
What k adds at least is `aside`: the least of the former. But so many may be on J while L is beyond it as have the time
there, and add nothing. The best of them is a fractional knapsack.
"""

from __future__ import annotations

from math import inf

from zbfx.schedule.unlike.problem import Lags, Unlike

LONGEST_TRIED = 3  # microbatches that are taken for L


def unlike_bound_s(problem: Unlike) -> float:
    """No order takes less."""
    f, b, w = problem.seconds
    most = max(sum(sum(f[s]) + sum(b[s]) + sum(w[s]) for s in own) for own in problem.stages)
    hops, count, m = hops_of(problem), len(problem.placement), len(problem.tables)
    starts = [s for s in range(count) if s not in hops]
    for start, following in zip(starts, [*starts[1:], count], strict=True):
        chain = range(start, following)  # values between chains go other ways
        beyond = {chain[-1]: [0.0] * m}
        for s in reversed(chain[1:]):
            up, down = hops[s]
            beyond[s - 1] = [up[k] + down[k] + f[s][k] + b[s][k] + beyond[s][k] for k in range(m)]
        ways = [f[start][k] + b[start][k] + beyond[start][k] for k in range(m)]
        for long in sorted(range(m), key=lambda k: -ways[k])[:LONGEST_TRIED]:
            most = max(most, ways[long] + w[start][long] + waits(problem, chain, hops, beyond, long))
    return most


def waits(
    problem: Unlike, chain: range, hops: dict[int, tuple[Lags, Lags]], beyond: dict[int, Lags], long: int
) -> float:
    """What all others add to the way of a microbatch."""
    f, b, _ = problem.seconds
    start = chain[0]
    others = [k for k in range(len(problem.tables)) if k != long]
    aside = {k: min(f[start][k], b[start][k]) for k in others}
    most = 0.0
    for j in chain:
        if j > start:
            up, down = hops[j]
            for k in others:
                # k can be in time for nothing while L's values travel, if its own travel faster.
                overtakes = f[j][k] - max(0.0, up[long] - up[k] - f[j - 1][k])
                overtaken = b[j - 1][k] - max(0.0, down[long] - down[k] - b[j][k])
                aside[k] = max(0.0, min(aside[k], overtakes, overtaken))
        room, added = beyond[j][long], 0.0
        for k in sorted(others, key=lambda k: -share(aside[k], f[j][k] + b[j][k])):
            fits = min(1.0, share(room, f[j][k] + b[j][k]))
            room = max(0.0, room - f[j][k] - b[j][k])
            added += aside[k] * (1.0 - fits)
        most = max(most, added)
    return most


def share(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else inf


def hops_of(problem: Unlike) -> dict[int, tuple[Lags, Lags]]:
    """By stage, how long values travel from the stage before, and back there, by microbatch, where they do."""
    forward, backward = problem.sources
    found = {}
    for s in range(1, len(problem.placement)):
        there = [lags for source, lags in forward[s] if source == s - 1]
        back = [lags for source, lags in backward[s - 1] if source == s]
        if there and back:
            found[s] = there[0], back[0]
    return found
