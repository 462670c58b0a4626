"""Orders for microbatches that cost unlike amounts: which goes first, and an order of actions per rank, within
milliseconds.

Takes   a cost table for each microbatch, all with one placement; what each rank may hold; whether microbatches keep
        their order.
Gives   an `UnlikePlan`. Events are simulated once per pass, and each pass makes orders by rules of its own. Passes try
        orders of microbatches and warm-ups, then changes of the best of them. Their number depends on the size of the
        problem and not on the clock: equal costs give equal plans in every process.
Raises  nothing. Source: list scheduling as in section 3.1 of the paper; passes and bound are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from math import inf
from random import Random

from zbfx.plan import Action, CostTable, Edge, Kind, Span, StageCost
from zbfx.schedule.schedule import Schedule

SEARCHED_ACTIONS = 6000  # of all passes together: some 50 ms
PASSES_AT_LEAST, PASSES_AT_MOST = 4, 32
GAPS_FILLED = (1.0, 0.5, 0.0)  # a W starts where it fits so many times into the gap before the next arrival

ByMicrobatch = list[list[float]]  # by stage and microbatch


@dataclass(frozen=True)
class Unlike:
    """The costs of a step's microbatches, and the bytes that each rank may hold beside static ones; None: any."""

    tables: tuple[CostTable, ...]
    limits: tuple[float, ...] | None = None

    @property
    def placement(self) -> tuple[int, ...]:
        return self.tables[0].placement

    @property
    def rank_count(self) -> int:
        return self.tables[0].rank_count

    @cached_property
    def stages(self) -> list[list[int]]:
        """By rank, later stages first: their Bs gate every earlier stage's."""
        found: list[list[int]] = [[] for _ in range(self.rank_count)]
        for stage in reversed(range(len(self.placement))):
            found[self.placement[stage]].append(stage)
        return found

    def column(self, value: Callable[[StageCost], object]) -> ByMicrobatch:
        return [[float(value(table.stages[s])) for table in self.tables] for s in range(len(self.placement))]  # type: ignore[arg-type]

    @cached_property
    def seconds(self) -> tuple[ByMicrobatch, ByMicrobatch, ByMicrobatch]:
        """Of F, B and W."""
        return (
            self.column(lambda stage: stage.forward_s),
            self.column(lambda stage: stage.backward_input_s),
            self.column(lambda stage: stage.backward_weight_s),
        )

    @cached_property
    def held(self) -> tuple[ByMicrobatch, ByMicrobatch]:
        """Bytes from F until B, and from B until W."""
        return self.column(lambda stage: stage.saved_bytes), self.column(lambda stage: stage.weight_saved_bytes)

    @cached_property
    def sources(self) -> tuple[list[list[tuple[int, list[float]]]], list[list[tuple[int, list[float]]]]]:
        """By stage, the stages that its F, and its B, wait for, and how long values travel, by microbatch."""
        forward: list[list[tuple[int, list[float]]]] = [[] for _ in self.placement]
        backward: list[list[tuple[int, list[float]]]] = [[] for _ in self.placement]
        by_pair = [{(edge.source, edge.target): edge for edge in table.edges} for table in self.tables]
        for low, high in sorted(set().union(*by_pair)):
            edges = [pairs.get((low, high)) for pairs in by_pair]
            here = self.placement[low] == self.placement[high]
            there, back = lags(edges, here, True), lags(edges, here, False)
            if there is not None:
                forward[high].append((low, there))
            if back is not None:
                backward[low].append((high, back))
        return forward, backward

    @cached_property
    def bound_s(self) -> float:
        """No order takes less: a rank works for all microbatches, and waits for the way of each from its first F there
        to the last stage and back."""
        f, b, w = self.seconds
        forward, backward = self.sources
        last = len(self.placement) - 1
        found = [sum(sum(f[s]) + sum(b[s]) + sum(w[s]) for s in own) for own in self.stages]
        for k in range(len(self.tables)):
            way = 0.0
            for stage in range(last, -1, -1):
                way += f[stage][k] + b[stage][k]
                rank = self.placement[stage]
                found[rank] = max(found[rank], way + w[stage][k])
                if stage:
                    there = [lag[k] for source, lag in forward[stage] if source == stage - 1]
                    back = [lag[k] for source, lag in backward[stage - 1] if source == stage]
                    way = way + there[0] + back[0] if there and back else 0.0
        return max(found)

    def mean(self) -> CostTable:
        """The costs of a microbatch on average: so many of these take as long on every rank."""
        first, count = self.tables[0], len(self.tables)
        f, b, w = self.seconds
        saved, later = self.held
        stages = tuple(
            StageCost(
                sum(f[s]) / count,
                sum(b[s]) / count,
                sum(w[s]) / count,
                saved_bytes=sum(saved[s]) / count,
                weight_saved_bytes=sum(later[s]) / count,
                static_bytes=stage.static_bytes,
                transient_bytes=max(table.stages[s].transient_bytes for table in self.tables),
                prologue_s=stage.prologue_s,
            )
            for s, stage in enumerate(first.stages)
        )
        forward, backward = self.sources
        there = {(s, t): sum(lag) / count for t, found in enumerate(forward) for s, lag in found}
        back = {(s, t): sum(lag) / count for s, found in enumerate(backward) for t, lag in found}
        edges = tuple(Edge(*pair, there.get(pair), back.get(pair)) for pair in sorted(there.keys() | back.keys()))
        return CostTable(stages, edges, first.placement)


def lags(edges: Sequence[Edge | None], here: bool, there: bool) -> list[float] | None:
    """How long values travel one way, by microbatch; None: nothing is sent that way."""
    found = [None if edge is None else edge.forward_s if there else edge.backward_s for edge in edges]
    if all(lag is None for lag in found):
        return None
    return [0.0 if here or lag is None else float(lag) for lag in found]


@dataclass(frozen=True)
class UnlikeRule:
    """`cap[s]`: most Fs of stage s whose B has not run. `patience`: as in `GAPS_FILLED`. `short_first`: of the Bs that
    have arrived, the shortest goes first, and an F before a B that lasts more than `pull` times as long; else Bs run in
    the order of their Fs, and before Fs. `eager`: Ws run before all else."""

    cap: tuple[int, ...]
    patience: float
    short_first: bool = False
    pull: float = inf
    eager: bool = False


@dataclass(frozen=True)
class UnlikePass:
    """What a pass has made: for each rank (group, start, end) of its actions, the group being 0 for F, 1 for B and 2
    for W, the stage, and the place of the microbatch in the order."""

    order: tuple[int, ...]
    rule: UnlikeRule
    iteration_s: float
    end_s: float
    ranks: list[list[tuple[int, int, int, float, float]]]
    peaks: list[float]

    @property
    def cost(self) -> tuple[float, float]:
        return self.iteration_s, self.end_s


@dataclass(frozen=True)
class UnlikePlan:
    """`order`: which row of the batch each microbatch of the schedule is."""

    order: tuple[int, ...]
    schedule: Schedule


def plan_unlike(problem: Unlike, *, trains: bool = True, keep_order: bool = False) -> UnlikePlan | None:
    """The best orders found; None where no pass stays within the limits. `trains`: with Bs and Ws. `keep_order`:
    microbatches run in the order in which they come."""
    if not trains:
        count = len(problem.placement)
        best = listed_pass(problem, given(problem), UnlikeRule((len(problem.tables),) * count, 0.0), False)
    else:
        best = best_pass(problem, keep_order)
    return None if best is None else planned_by(problem, best, trains)


def plan_one_by_one(problem: Unlike) -> UnlikePlan:
    """The order that holds least: one microbatch after the other on every stage, each W right after its B."""
    alone = replace(problem, limits=None)
    found = listed_pass(alone, given(alone), UnlikeRule((1,) * len(alone.placement), 0.0, eager=True), True)
    assert found is not None, "nothing limits it"
    return planned_by(alone, found, True)


def planned_by(problem: Unlike, best: UnlikePass, trains: bool) -> UnlikePlan:
    kinds = (Kind.F, Kind.B, Kind.W)
    spans = tuple(
        tuple(Span(Action(kinds[kind], stage, k), start, end) for kind, stage, k, start, end in rank)
        for rank in best.ranks
    )
    ranks = tuple(tuple(span.action for span in rank) for rank in spans)
    costs, bound_s = problem.mean(), problem.bound_s if trains else 0.0
    static = [sum(float(costs.stages[s].static_bytes) for s in own) for own in problem.stages]
    peaks = tuple(peak + always for peak, always in zip(best.peaks, static, strict=True))
    name = "unlike" if trains else "unlike forward"
    schedule = Schedule(name, costs, len(problem.tables), ranks, spans, peaks, lower_bound_s=bound_s)
    return UnlikePlan(best.order, schedule)


def best_pass(problem: Unlike, keep_order: bool) -> UnlikePass | None:
    """The best of as many passes as the problem's size allows."""
    m, count = len(problem.tables), len(problem.placement)
    passes = max(PASSES_AT_LEAST, min(PASSES_AT_MOST, SEARCHED_ACTIONS // (3 * m * count)))
    better: list[UnlikePass] = []  # each than the one before
    tried: set[tuple[tuple[int, ...], UnlikeRule]] = set()
    for order, rule in attempts(problem, keep_order, better):
        if (len(tried) >= passes and better) or len(tried) >= 2 * passes:
            break
        if (order, rule) in tried:
            continue
        tried.add((order, rule))
        found = listed_pass(problem, order, rule, True)
        if found is not None and (not better or found.cost < better[-1].cost):
            better.append(found)
            if found.iteration_s <= problem.bound_s * (1 + 1e-9):
                break
    return better[-1] if better else None


def given(problem: Unlike) -> tuple[int, ...]:
    return tuple(range(len(problem.tables)))


def attempts(
    problem: Unlike, keep_order: bool, better: Sequence[UnlikePass]
) -> Iterator[tuple[tuple[int, ...], UnlikeRule]]:
    """Orders and rules, the most promising first, and then changes of the best, which is the last of `better`."""
    caps, m = first_caps(problem), len(problem.tables)
    orders = [given(problem)] if keep_order else first_orders(problem)
    rules = [UnlikeRule(cap, GAPS_FILLED[0], short and not keep_order) for cap in caps for short in (True, False)]
    yield from ((order, rules[0]) for order in orders)
    drawn = Random(0)
    for turn in range(2 * PASSES_AT_MOST):
        order = list(better[-1].order if better else given(problem))
        rule = better[-1].rule if better else rules[-1]
        if turn % 4 == 3 or keep_order or m < 3:
            rule = replace(drawn.choice(rules), patience=drawn.choice(GAPS_FILLED))
        else:
            one, other = drawn.sample(range(m), 2)
            order.insert(other, order.pop(one))
        yield tuple(order), rule


def first_orders(problem: Unlike) -> list[tuple[int, ...]]:
    """Ever longer microbatches: all ranks soon have work, and what follows a long one has more to hide behind. The
    shortest come last in some, where they fill the long ways of those before them."""
    f, b, _ = problem.seconds
    work = [sum(f[s][k] + b[s][k] for s in range(len(f))) for k in range(len(problem.tables))]
    rising = sorted(range(len(work)), key=lambda k: (work[k], k))
    last = [len(work) * eighths // 8 for eighths in (4, 0, 2, 6)]
    return list(dict.fromkeys((*rising[count:], *rising[:count]) for count in last))


def first_caps(problem: Unlike) -> list[tuple[int, ...]]:
    """By stage: as many as there are; in proportion to the distance from the end; as 1F1B holds."""
    count, m = len(problem.placement), len(problem.tables)
    far = [count - s for s in range(count)]
    several = max(map(len, problem.stages)) > 1
    found = [(m,) * count, tuple(min(m, 2 * d - 1 + 2 * several) for d in far), tuple(min(m, d) for d in far)]
    return list(dict.fromkeys(found))


def listed_pass(problem: Unlike, order: Sequence[int], rule: UnlikeRule, trains: bool) -> UnlikePass | None:
    """Orders made event by event. A free rank takes a B that has arrived, else an F that has arrived and fits, else a W
    that fits into the gap before the next arrival, and waits otherwise. None: ranks are stuck at their limits."""
    return _Pass(problem, order, rule, trains).run()


class _Pass:
    def __init__(self, problem: Unlike, order: Sequence[int], rule: UnlikeRule, trains: bool) -> None:
        self.problem, self.order, self.rule, self.trains = problem, order, rule, trains
        count, m = len(problem.placement), len(order)
        self.limits = [inf] * problem.rank_count if problem.limits is None or not trains else list(problem.limits)
        self.f, self.b, self.w = ([[row[k] for k in order] for row in table] for table in problem.seconds)
        self.saved, self.later = ([[row[k] for k in order] for row in table] for table in problem.held)
        forward, backward = problem.sources
        self.forward = [[(source, [lag[k] for k in order]) for source, lag in found] for found in forward]
        self.backward = [[(source, [lag[k] for k in order]) for source, lag in found] for found in backward]
        self.receivers: list[list[list[tuple[int, list[float]]]]] = [[[] for _ in range(count)] for _ in range(2)]
        for kind, table in enumerate((self.forward, self.backward)):
            for stage, found in enumerate(table):
                for source, lag in found:
                    if problem.placement[source] != problem.placement[stage]:
                        self.receivers[kind][source].append((problem.placement[stage], lag))
        self.ends = [[[inf] * m for _ in range(count)] for _ in range(2)]  # of Fs and Bs, by stage and microbatch
        self.begun = [0] * count  # Fs
        self.open: list[list[int]] = [[] for _ in range(count)]  # microbatches whose B has not run
        self.waiting: list[list[int]] = [[] for _ in range(count)]  # microbatches whose W has not run
        self.held = [0.0] * problem.rank_count
        self.peaks = [0.0] * problem.rank_count
        self.ranks: list[list[tuple[int, int, int, float, float]]] = [[] for _ in range(problem.rank_count)]

    def run(self) -> UnlikePass | None:
        m, ranks = len(self.order), self.ranks
        free = [0.0] * len(ranks)
        seconds = (self.f, self.b, self.w)
        events = [(0.0, rank) for rank in range(len(ranks))]
        while events:
            now, rank = heappop(events)
            if free[rank] > now:
                continue
            kind, stage, k = self.choose(rank, now)
            if kind < 0:
                continue
            end = now + seconds[kind][stage][k]
            free[rank] = end
            ranks[rank].append((kind, stage, k, now, end))
            self.take(rank, kind, stage, k)
            if kind < 2:
                self.ends[kind][stage][k] = end
                for receiver, lag in self.receivers[kind][stage]:
                    heappush(events, (end + lag[k], receiver))
            heappush(events, (end, rank))
        expected = [len(own) * m * (3 if self.trains else 1) for own in self.problem.stages]
        if any(len(made) < total for made, total in zip(ranks, expected, strict=True)):
            return None
        iteration_s = max(made[-1][4] - made[0][3] for made in ranks)
        return UnlikePass(tuple(self.order), self.rule, iteration_s, max(free), ranks, self.peaks)

    def take(self, rank: int, kind: int, stage: int, k: int) -> None:
        """Note that an action begins, and what it holds."""
        if kind == 0:
            self.begun[stage] += 1
            if not self.trains:
                return
            self.open[stage].append(k)
            self.held[rank] += self.saved[stage][k]
        elif kind == 1:
            self.open[stage].remove(k)
            self.waiting[stage].append(k)
            self.held[rank] += self.later[stage][k] - self.saved[stage][k]
        else:
            self.waiting[stage].remove(k)
            self.held[rank] -= self.later[stage][k]
        if self.held[rank] > self.peaks[rank]:
            self.peaks[rank] = self.held[rank]

    def choose(self, rank: int, now: float) -> tuple[int, int, int]:
        """The kind, stage and microbatch that a rank runs next; the kind is -1 if it waits."""
        m, rule = len(self.order), self.rule
        if rule.eager and (weight := self.weight(rank, inf))[0] >= 0:
            return weight
        room = self.limits[rank] - self.held[rank]
        following = inf  # when the next action arrives
        blocked, finished = False, True
        backward, forward = (inf, -1, -1), (-1, -1)
        for stage in self.problem.stages[rank]:
            begun = self.begun[stage]
            for k in self.open[stage]:
                at = self.arrival(1, stage, k)
                if at <= now:
                    if self.later[stage][k] - self.saved[stage][k] > room:
                        blocked = True
                        continue
                    urgency = self.b[stage][k] if rule.short_first else k
                    if backward[1] < 0 or (urgency < backward[0] and stage == backward[1]):
                        backward = urgency, stage, k
                elif at < following:
                    following = at
                if not rule.short_first:
                    break
            finished = finished and begun == m and not self.open[stage]
            if begun < m and forward[0] < 0 and len(self.open[stage]) < rule.cap[stage]:
                at = self.arrival(0, stage, begun)
                if at <= now:
                    if self.needs(rank, stage, begun) <= room:
                        forward = stage, begun
                    else:
                        blocked = True
                elif at < following:
                    following = at
        if backward[1] >= 0:
            _, stage, k = backward
            if forward[0] < 0 or not rule.short_first or self.b[stage][k] <= rule.pull * self.f[forward[0]][forward[1]]:
                return 1, stage, k
        if forward[0] >= 0:
            return 0, *forward
        return self.weight(rank, inf if finished or blocked else following - now)

    def needs(self, rank: int, stage: int, k: int) -> float:
        """The bytes that an F must find free: no B comes back before the later stages of its rank have run, and what
        that B adds must fit too."""
        found, grows = 0.0, 0.0
        for later in self.problem.stages[rank]:
            if later >= stage:
                found += self.saved[later][k]
                grows = max(grows, self.later[later][k] - self.saved[later][k])
        return found + grows

    def arrival(self, kind: int, stage: int, k: int) -> float:
        """When what an action waits for is there, as far as known; inf where it is not even begun."""
        latest, ends = 0.0, self.ends[kind]
        for source, lag in (self.backward if kind else self.forward)[stage]:
            at = ends[source][k] + lag[k]
            if at > latest:
                latest = at
        return latest

    def weight(self, rank: int, gap: float) -> tuple[int, int, int]:
        """The longest W that fits into a gap, or the shortest if that nearly does."""
        longest, found = -1.0, (-1, 0, 0)
        least, short = inf, (-1, 0, 0)
        for stage in self.problem.stages[rank]:
            for k in self.waiting[stage]:
                lasts = self.w[stage][k]
                if longest < lasts <= gap:
                    longest, found = lasts, (2, stage, k)
                if lasts < least:
                    least, short = lasts, (2, stage, k)
        return found if found[0] >= 0 or gap < self.rule.patience * least else short


def activation_limits(tables: Sequence[CostTable], limits: Sequence[float] | None) -> tuple[float, ...] | None:
    """What limits in bytes per rank leave beside what is held throughout, and the most that an action needs inside."""
    if limits is None:
        return None
    return tuple(
        most
        - sum(float(tables[0].stages[s].static_bytes) for s in own)
        - max(float(table.stages[s].transient_bytes) for table in tables for s in own)
        for rank, most in enumerate(limits)
        for own in [tables[0].stages_of(rank)]
    )
