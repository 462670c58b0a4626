"""A part of a schedule whose order is free, cut out so that the rest acts on it only through numbers.

Takes   timed orders of all ranks, and which stretch of the actions by start is free.
Gives   a `Window`: per action a release time and the ticks from its end to the end of each rank's step, per rank the
        memory held when it opens. The window that takes everything is the whole problem.
Raises  nothing. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from zbfx.timing.exact import BW, B, Instance, longest_paths

Arc = tuple[int, int, int]  # (a, b, lag): b starts no earlier than `lag` ticks after the end of a


@dataclass(frozen=True)
class TimedOrders:
    """The orders of all ranks as one graph. Actions are numbered rank by rank; times in ticks."""

    problem: Instance
    orders: tuple[tuple[int, ...], ...]
    codes: tuple[int, ...]
    ranks: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    sources: tuple[tuple[tuple[int, int], ...], ...]  # per action: whose value it needs, ticks on the way
    by_start: tuple[int, ...]  # the actions sorted by start, an action always after those that it waits for
    begins: tuple[int, ...]  # per rank: start of its first action

    @classmethod
    def of(cls, problem: Instance, orders: Sequence[Sequence[int]]) -> TimedOrders:
        """`orders` in codes; they were checked before and run to their end."""
        m = problem.microbatches
        begun = longest_paths(problem, orders).starts
        codes = [code for order in orders for code in order]
        ranks = [rank for rank, order in enumerate(orders) for _ in order]
        starts = [start for row in begun for start in row]
        maker = {problem.output[code // m] * m + code % m: number for number, code in enumerate(codes)}
        sources = [[(maker[group * m + code % m], lag) for group, lag in problem.sources[code // m]] for code in codes]
        waits = {number: {source for source, _ in needed} for number, needed in enumerate(sources)}
        for number in range(1, len(codes)):
            if ranks[number] == ranks[number - 1]:
                waits[number].add(number - 1)
        position = {number: place for place, number in enumerate(TopologicalSorter(waits).static_order())}
        return cls(
            problem=problem,
            orders=tuple(map(tuple, orders)),
            codes=tuple(codes),
            ranks=tuple(ranks),
            starts=tuple(starts),
            ends=tuple(start + problem.ticks[code // m] for start, code in zip(starts, codes, strict=True)),
            sources=tuple(map(tuple, sources)),
            by_start=tuple(sorted(range(len(codes)), key=lambda number: (starts[number], position[number]))),
            begins=tuple(row[0] for row in begun),
        )

    @property
    def spans_ticks(self) -> tuple[int, ...]:
        """Per rank the time from its first start to its last end; the largest is the paper's cost."""
        last = [0] * len(self.orders)
        for rank, end in zip(self.ranks, self.ends, strict=True):
            last[rank] = max(last[rank], end)
        return tuple(end - begin for end, begin in zip(last, self.begins, strict=True))


@dataclass(frozen=True)
class Window:
    """Free actions, numbered from 0 rank by rank in their present order, and what the fixed rest imposes on them. Times
    in ticks."""

    codes: tuple[int, ...]
    ranks: tuple[int, ...]
    ticks: tuple[int, ...]
    grows: tuple[int, ...]  # memory units that an action adds
    starts: tuple[int, ...]  # in the present order
    releases: tuple[int, ...]  # earliest starts
    arcs: tuple[Arc, ...]
    tails: tuple[dict[int, int], ...]  # per action: rank -> ticks from the action's end to the end of the rank's step
    held: tuple[int, ...]  # per rank: memory units held when the window opens
    begins: tuple[int, ...]  # per rank: start of its step
    floor_ticks: int  # the cost is at least this, whatever the order inside the window

    @property
    def cost_ticks(self) -> int:
        """What the step costs in the present order."""
        ends = zip(self.starts, self.ticks, self.tails, strict=True)
        return max(
            [
                self.floor_ticks,
                *(start + ticks + tail - self.begins[r] for start, ticks, tails in ends for r, tail in tails.items()),
            ]
        )

    def deadline(self, action: int, cost_ticks: int) -> int:
        """The latest end of `action` in a step of `cost_ticks`."""
        return min(self.begins[rank] + cost_ticks - tail for rank, tail in self.tails[action].items())

    def in_order(self, starts: Sequence[float]) -> list[list[int]]:
        """Per rank the codes of the free actions sorted by `starts`."""
        rows: list[list[int]] = [[] for _ in self.begins]
        for action in sorted(range(len(self.codes)), key=lambda a: starts[a]):
            rows[self.ranks[action]].append(self.codes[action])
        return rows


def open_window(timed: TimedOrders, first: int, last: int) -> Window:
    """Free the actions `timed.by_start[first:last]`."""
    problem, m = timed.problem, timed.problem.microbatches
    numbers = sorted(timed.by_start[first:last])
    index = {number: action for action, number in enumerate(numbers)}
    before = timed.by_start[:first]
    opens, held = [0] * len(timed.orders), [0] * len(timed.orders)
    for number in before:
        rank = timed.ranks[number]
        opens[rank] = max(opens[rank], timed.ends[number])
        held[rank] += problem.grows[timed.codes[number] // m]
    tails = tails_of(timed, first, last)
    arcs = fixed_arcs(timed, numbers)
    releases = []
    for action, number in enumerate(numbers):
        inside = [(index[source], action, lag) for source, lag in timed.sources[number] if source in index]
        outside = [timed.ends[source] + lag for source, lag in timed.sources[number] if source not in index]
        arcs += inside
        releases.append(max([opens[timed.ranks[number]], *outside]))
    return Window(
        codes=tuple(timed.codes[number] for number in numbers),
        ranks=tuple(timed.ranks[number] for number in numbers),
        ticks=tuple(problem.ticks[timed.codes[number] // m] for number in numbers),
        grows=tuple(problem.grows[timed.codes[number] // m] for number in numbers),
        starts=tuple(timed.starts[number] for number in numbers),
        releases=tuple(releases),
        arcs=tuple(arcs),
        tails=tuple(tails[number] for number in numbers),
        held=tuple(held),
        begins=timed.begins,
        floor_ticks=max(
            (timed.ends[n] + tail - timed.begins[rank] for n in before for rank, tail in tails[n].items()), default=0
        ),
    )


def fixed_arcs(timed: TimedOrders, numbers: Sequence[int]) -> list[Arc]:
    """Microbatches keep their order within each kind and stage: all cost the same, so exchanging two gains nothing."""
    problem, latest, arcs = timed.problem, dict[tuple[int, int], int](), []
    for action, number in enumerate(numbers):
        kind, stage = divmod(timed.codes[number] // problem.microbatches, problem.stage_count)
        chain = B if kind == BW else kind, stage
        if chain in latest:
            arcs.append((latest[chain], action, 0))
        latest[chain] = action
    return arcs


def tails_of(timed: TimedOrders, first: int, last: int) -> dict[int, dict[int, int]]:
    """Per action and rank the ticks from the action's end to the end of the rank's step, over fixed actions only. What
    follows an action on its rank is the next fixed action, so free actions in between do not count."""
    problem, m = timed.problem, timed.problem.microbatches
    free = set(timed.by_start[first:last])
    users: dict[int, list[tuple[int, int]]] = {}
    tails: dict[int, dict[int, int]] = {}
    following: dict[int, int] = {}  # per rank: the fixed action that comes next
    for number in reversed(timed.by_start):
        rank, tail = timed.ranks[number], dict[int, int]()
        followers = list(users.get(number, []))
        if rank in following:
            followers.append((following[rank], 0))
        else:
            tail[rank] = 0
        for follower, lag in followers:
            through = lag + problem.ticks[timed.codes[follower] // m]
            for end, rest in tails[follower].items():
                tail[end] = max(tail.get(end, 0), through + rest)
        tails[number] = tail
        if number not in free:
            following[rank] = number
            for source, lag in timed.sources[number]:
                users.setdefault(source, []).append((number, lag))
    return tails
