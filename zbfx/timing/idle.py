"""Why ranks idle: each idle second of a step has one cause, and the causes of a rank add up to its idle time.

Takes   a cost table, and when every action ran, as planned or as measured.
Gives   the idle time of every rank in pieces with a cause.
Raises  nothing: orders are checked before.
Source  ours; `docs/report.md` defines the causes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zbfx.plan import Action, CostTable, Kind, Span, Timetable, parts
from zbfx.timing.critical import Spans
from zbfx.timing.fillers import Curve, Filler, ready_times
from zbfx.timing.prologues import without_prologues
from zbfx.timing.simulate import simulate
from zbfx.timing.sources import Sources
from zbfx.timing.two_streams import as_they_run, iteration_s

SAME = 1e-12  # of a time


class Cause(StrEnum):
    """Why a rank idles, at some moment. `docs/report.md` has the definitions."""

    DEPENDENCY = "dependency"
    IMBALANCE = "imbalance"
    MESSAGE = "message"
    MEMORY = "memory limit"
    ORDER = "order"
    LAUNCH = "launch"
    NEXT = "next step"


@dataclass(frozen=True, slots=True)
class Idle:
    """A piece of a rank's idle time. `before` is the action that the rank is to run next; None: it has run all.
    `because` is the action that runs elsewhere meanwhile, whose result travels, or which might have run here."""

    rank: int
    start_s: float
    end_s: float
    cause: Cause
    before: Action | None = None
    because: Action | None = None

    @property
    def idle_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two actions of a rank; `index` is that of the span that ends it."""

    end_s: float
    start_s: float
    rank: int
    index: int


def idle_times(
    costs: CostTable, ranks: Spans, memory: Sequence[Curve] | None = None, limits: Sequence[float] | None = None
) -> tuple[tuple[Idle, ...], ...]:
    """Per rank its idle time, from its first start for one iteration time, in order.

    `ranks` are the spans of each rank, sorted by start. `limits` are bytes per rank, and `memory` what each holds, on
    the clock of the spans; without either nothing idles for a memory limit. Prologues, before the first start, count
    for nothing."""
    sources, ranks = Sources(costs), without_prologues(ranks)
    ready_s = ready_times(sources, ranks)
    held = memory or [()] * len(ranks)
    able = [
        Filler(costs, row, ready_s, held[rank], limits[rank] if limits and memory else None)
        for rank, row in enumerate(ranks)
    ]
    causes = Causes(sources, ranks)
    # What a rank waits for ends before its wait does, so that gaps are explained in the order of their ends.
    for gap in sorted((g for rank, row in enumerate(ranks) for g in gaps(rank, row)), key=lambda g: g.end_s):
        causes.explain(gap, able[gap.rank])
    step_s = iteration_s(ranks)
    for rank, row in enumerate(ranks):
        if row:
            causes.add(Idle(rank, max(span.end_s for span in row), row[0].start_s + step_s, Cause.NEXT))
    return tuple(map(tuple, causes.pieces))


def idle_of(schedule: Timetable) -> tuple[tuple[Idle, ...], ...]:
    """The idle time of a schedule, as planned."""
    # Memory is known on the clock on which the actions of a rank run one after the other.
    curves = None if schedule.beside else memory_of(schedule)
    return idle_times(schedule.costs, as_they_run(schedule), curves, schedule.mem_limit)


def memory_of(schedule: Timetable) -> Sequence[Curve]:
    """What each rank holds: by its program where there is one, else by the costs."""
    return schedule.memory or simulate(schedule.costs, schedule.microbatches, schedule.ranks).memory


def gaps(rank: int, spans: Sequence[Span]) -> Iterator[Gap]:
    busy_s = spans[0].start_s if spans else 0.0
    for index, span in enumerate(spans):
        if span.start_s > busy_s:
            yield Gap(span.start_s, busy_s, rank, index)
        busy_s = max(busy_s, span.end_s)


class Causes:
    """Finds the causes of one gap after the other. `pieces[rank]` are those found so far, in order."""

    def __init__(self, sources: Sources, ranks: Spans) -> None:
        self.sources, self.ranks = sources, ranks
        self.pieces: list[list[Idle]] = [[] for _ in ranks]
        self.starts = [[span.start_s for span in row] for row in ranks]
        self.place = {part: (rank, s) for rank, row in enumerate(ranks) for s in row for part in parts(s.action)}
        self.mean_s = mean_seconds(ranks)

    def add(self, piece: Idle) -> None:
        if piece.end_s <= piece.start_s:
            return
        own = self.pieces[piece.rank]
        if own and own[-1].end_s == piece.start_s and like(own[-1]) == like(piece):
            own[-1] = Idle(piece.rank, own[-1].start_s, piece.end_s, *like(piece))
        else:
            own.append(piece)

    def explain(self, gap: Gap, filler: Filler) -> None:
        """The parts of a gap in which something else might have run, and the causes of what is left."""
        action, at_s = self.ranks[gap.rank][gap.index].action, gap.start_s
        for start_s, end_s, found, fits in filler.runs_in(gap.index, gap.start_s, gap.end_s):
            self.wait(gap.rank, action, at_s, start_s)
            self.add(Idle(gap.rank, start_s, end_s, Cause.ORDER if fits else Cause.MEMORY, action, found))
            at_s = end_s
        self.wait(gap.rank, action, at_s, gap.end_s)

    def wait(self, rank: int, action: Action, start_s: float, end_s: float) -> None:
        """Why a rank waits before an action from `start_s` to `end_s`. While the input that comes last is not there,
        the wait is for that: for its message, for the action that makes it, or, if that has not begun, for what that
        one waits for in turn. An action that has its inputs waits for its rank."""
        found: list[Idle] = []  # from the last to the first
        late: Action | None = action
        while late is not None and start_s < end_s:
            arrival_s, made = max(self.arrivals(late), key=lambda a: a[0], default=(start_s, None))
            ready_s = clamp(arrival_s, start_s, end_s)
            owner = self.place[parts(late)[0]][0]
            ours = [Idle(rank, ready_s, end_s, Cause.LAUNCH, None, late)] if late == action else []
            found += ours or reversed(list(self.at(owner, ready_s, end_s)))
            end_s, late = ready_s, None
            if made is not None:
                sent_s, begun_s = clamp(made.end_s, start_s, end_s), clamp(made.start_s, start_s, end_s)
                found.append(Idle(rank, sent_s, end_s, Cause.MESSAGE, None, made.action))
                found += reversed(list(self.running(made, begun_s, sent_s)))
                end_s, late = begun_s, made.action
        for piece in reversed(found):
            self.add(Idle(rank, piece.start_s, piece.end_s, piece.cause, action, piece.because))

    def arrivals(self, action: Action) -> Iterator[tuple[float, Span]]:
        """When what an action needs is there, and what makes it."""
        for found in self.sources.of_stage(action):
            if found in self.place:
                yield self.place[found][1].end_s, self.place[found][1]
        for found, lag_s in self.sources.elsewhere(action):
            if found in self.place:
                yield self.place[found][1].end_s + lag_s, self.place[found][1]

    def running(self, span: Span, start_s: float, end_s: float) -> Iterator[Idle]:
        """A part of an action as the cause for which another rank waits: what it takes longer than the mean action of
        its kind is imbalance."""
        balanced_s = clamp(span.start_s + self.mean_s[span.action.kind], start_s, end_s)
        yield Idle(0, start_s, balanced_s, Cause.DEPENDENCY, None, span.action)
        yield Idle(0, balanced_s, end_s, Cause.IMBALANCE, None, span.action)

    def at(self, rank: int, start_s: float, end_s: float) -> Iterator[Idle]:
        """What a rank does from `start_s` to `end_s`, as the cause for which another waits: it runs something, or it
        idles itself, for a cause that is known."""
        spans, pieces = self.ranks[rank], self.pieces[rank]
        index = max(0, bisect_right(self.starts[rank], start_s) - 2)  # two may run at a time
        while start_s < end_s:
            while index < len(spans) and spans[index].end_s <= start_s:
                index += 1
            span = spans[index] if index < len(spans) else None
            if span is not None and span.start_s <= start_s:
                until_s = min(end_s, span.end_s)
                yield from self.running(span, start_s, until_s)
            else:
                until_s = end_s if span is None else min(end_s, span.start_s)
                at_s = start_s
                first = bisect_right(pieces, start_s, key=lambda piece: piece.end_s)
                for piece in pieces[first:]:
                    if piece.start_s >= until_s:
                        break
                    yield Idle(rank, max(at_s, piece.start_s), min(until_s, piece.end_s), *like(piece))
                    at_s = min(until_s, piece.end_s)
                # Clocks of several devices may disagree: then nothing is known here.
                yield Idle(rank, at_s, until_s, Cause.LAUNCH)
            start_s = until_s


def clamp(value: float, least: float, most: float) -> float:
    """Values that differ by rounding alone are the same moment."""
    if abs(value - most) <= SAME * most:
        return most
    return least if abs(value - least) <= SAME * least else min(max(value, least), most)


def like(piece: Idle) -> tuple[Cause, Action | None, Action | None]:
    return piece.cause, piece.before, piece.because


def mean_seconds(ranks: Spans) -> Mapping[Kind, float]:
    """The mean time of an action of each kind, over all ranks."""
    taken: dict[Kind, list[float]] = defaultdict(list)
    for span in (span for row in ranks for span in row):
        taken[span.action.kind].append(span.end_s - span.start_s)
    return {kind: sum(found) / len(found) for kind, found in taken.items()}
