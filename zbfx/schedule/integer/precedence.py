"""What must come before what in a window, if the step is to cost no more than a given number of ticks.

Takes   a window, the most ticks, a limit per rank.
Gives   a `Precedence`: forced orders, earliest starts (heads) and latest ends; None if no order costs so little.
Raises  nothing. Source: immediate selection in a disjunctive problem (Carlier and Pinson 1989). Where one of two
        actions of a rank cannot come first, by time or memory, the other must, and that moves heads and ends again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbfx.schedule.integer.window import Window


@dataclass
class Precedence:
    """`before[b]` has bit a set where a must end before b starts; `heads` are earliest starts, `ends` latest ends."""

    window: Window
    before: list[int]
    after: list[int]
    heads: list[int]
    ends: list[int]

    def ordered(self, a: int, b: int) -> bool:
        return bool(self.before[b] >> a & 1 or self.before[a] >> b & 1)

    def open_pairs(self) -> list[tuple[int, int]]:
        """Pairs of one rank whose order is not forced."""
        return [
            (a, b)
            for actions in rank_members(self.window)
            for position, a in enumerate(actions)
            for b in actions[position + 1 :]
            if not self.ordered(a, b)
        ]

    def require(self, a: int, b: int) -> None:
        """Let a come before b, and with it everything that this implies."""
        first, then = self.before[a] | 1 << a, self.after[b] | 1 << b
        for action in members(then):
            self.before[action] |= first
        for action in members(first):
            self.after[action] |= then


def members(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def rank_members(window: Window) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in window.begins]
    for action, rank in enumerate(window.ranks):
        rows[rank].append(action)
    return rows


def forced_precedence(window: Window, cost_ticks: int, limits: Sequence[int] | None) -> Precedence | None:
    """All forced orders that are found, or None if no order costs `cost_ticks` or less. `limits`: memory units per
    rank."""
    if window.floor_ticks > cost_ticks:
        return None
    count = len(window.codes)
    deadlines = [window.deadline(action, cost_ticks) for action in range(count)]
    found = Precedence(window, [0] * count, [0] * count, list(window.releases), deadlines)
    for a, b, _ in window.arcs:
        found.require(a, b)
    return found if tighten(found, limits) else None


def tighten(found: Precedence, limits: Sequence[int] | None) -> bool:
    """Repeat until nothing changes. False if no order is left."""
    into: list[list[tuple[int, int]]] = [[] for _ in found.window.codes]
    out: list[list[tuple[int, int]]] = [[] for _ in found.window.codes]
    for a, b, lag in found.window.arcs:
        into[b].append((a, lag))
        out[a].append((b, lag))
    rows = rank_members(found.window)
    known = -1
    while known != (known := sum(mask.bit_count() for mask in found.before)):
        raise_heads(found, into, rows)
        lower_ends(found, out, rows)
        if any(h + t > e for h, t, e in zip(found.heads, found.window.ticks, found.ends, strict=True)):
            return False
        if not select_by_time(found):
            return False
        if limits is not None and not all(
            select_by_memory(found, actions, limits[rank] - found.window.held[rank])
            for rank, actions in enumerate(rows)
        ):
            return False
    return True


def raise_heads(found: Precedence, into: Sequence[Sequence[tuple[int, int]]], rows: Sequence[Sequence[int]]) -> None:
    ticks, heads, window = found.window.ticks, found.heads, found.window
    masks = [sum(1 << action for action in row) for row in rows]
    for b in sorted(range(len(heads)), key=lambda action: found.before[action].bit_count()):
        head = heads[b]
        for a, lag in into[b]:
            head = max(head, heads[a] + ticks[a] + lag)
        # All that must come first on this rank, from its latest heads on, has to fit in between.
        work = 0
        for a in sorted(members(found.before[b] & masks[window.ranks[b]]), key=lambda action: -heads[action]):
            work += ticks[a]
            head = max(head, heads[a] + work)
        heads[b] = head


def lower_ends(found: Precedence, out: Sequence[Sequence[tuple[int, int]]], rows: Sequence[Sequence[int]]) -> None:
    ticks, ends, window = found.window.ticks, found.ends, found.window
    masks = [sum(1 << action for action in row) for row in rows]
    for a in sorted(range(len(ends)), key=lambda action: found.after[action].bit_count()):
        end = ends[a]
        for b, lag in out[a]:
            end = min(end, ends[b] - ticks[b] - lag)
        work = 0
        for b in sorted(members(found.after[a] & masks[window.ranks[a]]), key=lambda action: ends[action]):
            work += ticks[b]
            end = min(end, ends[b] - work)
        ends[a] = end


def select_by_time(found: Precedence) -> bool:
    """Order every pair of which only one way fits between heads and ends. False if neither way fits."""
    ticks, heads, ends = found.window.ticks, found.heads, found.ends
    for a, b in found.open_pairs():
        a_first = heads[a] + ticks[a] + ticks[b] <= ends[b]
        b_first = heads[b] + ticks[b] + ticks[a] <= ends[a]
        if not a_first and not b_first:
            return False
        if not (a_first and b_first) and not found.ordered(a, b):
            found.require(*((a, b) if a_first else (b, a)))
    return True


def select_by_memory(found: Precedence, actions: Sequence[int], free_units: int) -> bool:
    """Before each action that takes memory, order what must release some first; after it, what would leave it no room.
    False if an action does not fit even after all that may release memory before it."""
    grows = found.window.grows
    for b in actions:
        if grows[b] <= 0:
            continue
        open_actions = [a for a in actions if a != b and not found.ordered(a, b)]
        spare = free_units - grows[b] - sum(min(0, grows[a]) for a in open_actions)
        spare -= sum(grows[a] for a in actions if found.before[b] >> a & 1)
        if spare < 0:
            return False
        for a in open_actions:
            if abs(grows[a]) > spare and not found.ordered(a, b):
                found.require(*((a, b) if grows[a] < 0 else (b, a)))
    return True
