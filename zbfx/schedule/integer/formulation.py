"""The integer linear program of a window of a schedule.

Takes   the forced orders of a window, the costs of interest, a limit per rank.
Gives   an `IntegerProgram`: continuous start times, and a binary for every two actions of a rank in no forced order.
Raises  nothing.
Source  appendix G of the paper, with three differences:
        - Microbatches keep their order within each kind and stage. Without that the objective as printed allows cost 0.
        - Orders that follow from the largest cost of interest are fixed beforehand. The other pairs get the smallest
          big-M that heads and ends allow.
        - Rows that sum the work before and after an action tie the binaries to the times. In the relaxation big-M alone
          says nothing about them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from zbfx.schedule.integer.precedence import Precedence, members, rank_members

MOST_TRIPLES = 30_000  # rows that forbid cycles of three; beyond this they cost the solver more than they help


@dataclass(frozen=True)
class Row:
    """`sum(coefficients[k] * x[columns[k]]) <= bound`."""

    columns: tuple[int, ...]
    coefficients: tuple[float, ...]
    bound: float


@dataclass
class IntegerProgram:
    """Minimise column 0 over `rows`; columns from `first_binary` on are 0 or 1. `start`: values of a known solution."""

    lower: list[float]
    upper: list[float]
    first_binary: int
    rows: list[Row] = field(default_factory=list)
    start: list[float] | None = None


@dataclass(frozen=True)
class Term:
    """`constant + coefficient * x[column]`."""

    constant: float
    column: int = 0
    coefficient: float = 0.0


COST = Term(0.0, 0, 1.0)
NEVER, ALWAYS = Term(0.0), Term(1.0)


class Formulation:
    """Columns (the cost, a start per action, a binary per open pair) and rows of one window. Times are in units of the
    window's longest action and count from its opening, which keeps coefficients near 1."""

    def __init__(self, forced: Precedence, bound_ticks: int, cost_ticks: int) -> None:
        self.forced, self.window = forced, forced.window
        self.unit = max([1, *self.window.ticks])
        self.origin = min(self.window.releases, default=0)
        self.pairs = forced.open_pairs()
        first_pair = 1 + len(self.window.codes)
        self.pair_column = {pair: first_pair + index for index, pair in enumerate(self.pairs)}
        latest = [end - ticks for end, ticks in zip(forced.ends, self.window.ticks, strict=True)]
        self.program = IntegerProgram(
            lower=[self.length(bound_ticks), *map(self.time, forced.heads), *[0.0] * len(self.pairs)],
            upper=[self.length(cost_ticks), *map(self.time, latest), *[1.0] * len(self.pairs)],
            first_binary=first_pair,
        )

    def length(self, ticks: int) -> float:
        return ticks / self.unit

    def time(self, ticks: int) -> float:
        return (ticks - self.origin) / self.unit

    def start(self, action: int) -> Term:
        return Term(0.0, 1 + action, 1.0)

    def first(self, a: int, b: int) -> Term:
        """1 if a comes before b, else 0."""
        if self.forced.before[b] >> a & 1:
            return ALWAYS
        if self.forced.before[a] >> b & 1:
            return NEVER
        if (a, b) in self.pair_column:
            return Term(0.0, self.pair_column[a, b], 1.0)
        return Term(1.0, self.pair_column[b, a], -1.0)

    def add(self, terms: Sequence[tuple[float, Term]], bound: float) -> None:
        """Add the row sum(weight * term) <= bound, unless no column is in it."""
        total: dict[int, float] = {}
        for weight, term in terms:
            bound -= weight * term.constant
            if term.coefficient:
                total[term.column] = total.get(term.column, 0.0) + weight * term.coefficient
        kept = {column: value for column, value in total.items() if value}
        if kept:
            self.program.rows.append(Row(tuple(kept), tuple(kept.values()), bound))


def formulate(forced: Precedence, bound_ticks: int, cost_ticks: int, limits: Sequence[int] | None) -> IntegerProgram:
    """The program for orders that cost from `bound_ticks` to `cost_ticks`. `limits`: memory units per rank. It starts
    from the window's present order, if that costs no more than `cost_ticks`."""
    model = Formulation(forced, bound_ticks, cost_ticks)
    window = forced.window
    add_times(model)
    add_cost(model)
    for rank, actions in enumerate(rank_members(window)):
        add_work(model, rank, actions)
        if limits is not None:
            add_memory(model, actions, limits[rank] - window.held[rank])
    triples = [triple for actions in rank_members(window) for triple in open_triples(forced, actions)]
    for a, b, c in triples if len(triples) <= MOST_TRIPLES else ():
        model.add([(1.0, model.first(a, b)), (1.0, model.first(b, c)), (-1.0, model.first(a, c))], 1.0)
    if window.cost_ticks <= cost_ticks:
        # Actions are numbered in the present order, so the lower one of a pair comes first.
        starts = map(model.time, window.starts)
        model.program.start = [model.length(window.cost_ticks), *starts, *[1.0] * len(model.pairs)]
    return model.program


def starts_of(forced: Precedence, values: Sequence[float]) -> Sequence[float]:
    """The start times in a solution, for `Window.in_order`."""
    return values[1 : 1 + len(forced.window.codes)]


def add_times(model: Formulation) -> None:
    """The paper's dependency constraints, forced orders, and one of two orders for each open pair."""
    window, forced = model.window, model.forced
    for a, b, lag in sorted({*window.arcs, *((a, b, 0) for a, b in forced_neighbours(forced))}):
        model.add([(1.0, model.start(a)), (-1.0, model.start(b))], -model.length(window.ticks[a] + lag))
    for pair in model.pairs:
        for a, b in (pair, pair[::-1]):
            # start(b) >= start(a) + T_a - slack * (1 - first(a, b)); heads and ends leave no more slack than this.
            slack = model.length(max(0, forced.ends[a] - forced.heads[b]))
            terms = [(1.0, model.start(a)), (-1.0, model.start(b)), (slack, model.first(a, b))]
            model.add(terms, slack - model.length(window.ticks[a]))


def forced_neighbours(forced: Precedence) -> Iterator[tuple[int, int]]:
    """Pairs of one rank in forced order with no third action of it forced in between."""
    for actions in rank_members(forced.window):
        mask = sum(1 << action for action in actions)
        for b in actions:
            earlier = forced.before[b] & mask
            yield from ((a, b) for a in members(earlier) if not forced.after[a] & earlier)


def add_cost(model: Formulation) -> None:
    """Every rank's step ends within the cost (the paper's objective)."""
    window = model.window
    for action, tails in enumerate(window.tails):
        for rank, tail in tails.items():
            after = model.length(window.ticks[action] + tail)
            model.add([(1.0, model.start(action)), (-1.0, COST)], model.time(window.begins[rank]) - after)


def add_work(model: Formulation, rank: int, actions: Sequence[int]) -> None:
    """All work before an action lies between the opening and the action, all work after it between it and the end."""
    window = model.window
    opening = min((model.forced.heads[action] for action in actions), default=0)
    tail = min((window.tails[action].get(rank, 0) for action in actions), default=0)
    for b in actions:
        others = [a for a in actions if a != b]
        before = [(model.length(window.ticks[a]), model.first(a, b)) for a in others]
        model.add([*before, (-1.0, model.start(b))], -model.time(opening))
        behind = [(model.length(window.ticks[a]), model.first(b, a)) for a in others]
        after = model.length(window.ticks[b] + tail)
        model.add([*behind, (1.0, model.start(b)), (-1.0, COST)], model.time(window.begins[rank]) - after)


def add_memory(model: Formulation, actions: Sequence[int], free_units: int) -> None:
    """The paper's memory constraint, for each action that adds memory."""
    grows = model.window.grows
    size = max([1, *(abs(grows[action]) for action in actions)])
    for b in actions:
        if grows[b] > 0:
            held = [(grows[a] / size, model.first(a, b)) for a in actions if a != b and grows[a]]
            model.add(held, (free_units - grows[b]) / size)


def open_triples(forced: Precedence, actions: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(a, b, c) where a < b < c < a is a cycle that forced orders do not exclude."""
    for a, b, c in combinations(actions, 3):
        if (not forced.ordered(a, b)) + (not forced.ordered(b, c)) + (not forced.ordered(a, c)) >= 2:
            yield a, b, c
            yield a, c, b
