"""Which list-scheduling rules to try, the most promising first, and how to vary one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from random import Random
from time import perf_counter

from zbfx.schedule.exact import Instance
from zbfx.schedule.listing import LATER, PATIENCE_UNIT, TURNS, Listed, ListScheduler, Rule

PATIENCES = (PATIENCE_UNIT, 0, 3, 2, 1)
FLAGS = ((False, False), (False, True), (True, False), (True, True))  # alternate, recycle


def first_rules(
    problem: Instance, limits: Sequence[int] | None, warm_up: Sequence[tuple[int, int]] | None
) -> Iterator[Rule]:
    """A grid over warm-ups, caps, patience and alternation.

    `warm_up`, the range of Fs before the first B in which schedules that meet the bound lie, leads where it is known:
    with patience it meets the bound at the paper's 1p limit, without patience at 2p.
    """
    shapes = (
        _linear_shapes(problem, limits, warm_up)
        if problem.rank_count == problem.stage_count
        else _folded_shapes(problem, limits)
    )
    p = problem.rank_count
    turns = (LATER,) if p == problem.stage_count else TURNS
    for (hold, cap), turn, patience, (alternate, recycle) in product(shapes, turns, PATIENCES, FLAGS):
        yield Rule(hold, cap, (patience,) * p, (alternate,) * p, (recycle,) * p, (turn,) * p)


def most_in_flight(problem: Instance, limits: Sequence[int] | None) -> list[int]:
    """Per stage how many of its Fs alone fill the memory of its rank."""
    m = problem.microbatches
    if limits is None:
        return [m] * problem.stage_count
    return [
        min(m, limits[problem.placement[s]] // problem.grows[s]) if problem.grows[s] else m
        for s in range(problem.stage_count)
    ]


def _linear_shapes(
    problem: Instance, limits: Sequence[int] | None, warm_up: Sequence[tuple[int, int]] | None
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(hold, cap) pairs for one stage per rank."""
    m, p = problem.microbatches, problem.stage_count
    most = most_in_flight(problem, limits)

    def bounded(counts: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(1, min(count, limit)) for count, limit in zip(counts, most, strict=True))

    narrow, wide = bounded([p - i for i in range(p)]), bounded([2 * (p - i) - 1 for i in range(p)])
    holds, caps = [], []
    if warm_up is not None:
        holds = [bounded([high for _, high in warm_up]), bounded([low for low, _ in warm_up])]
        caps = [holds[0]]
    holds += [narrow, wide]
    caps += [
        wide,
        bounded([p - i + 1 for i in range(p)]),
        narrow,
        bounded([2 * (p - i) for i in range(p)]),
        bounded([m] * p),
    ]
    pairs = [(hold, cap) for hold in holds for cap in caps if all(h <= c for h, c in zip(hold, cap, strict=True))]
    return list(dict.fromkeys(pairs))


def _folded_shapes(problem: Instance, limits: Sequence[int] | None) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(hold, cap) pairs for several stages per rank: the same warm-up on all stages, scaled by how far a stage is from the last one."""
    count = problem.stage_count
    most = most_in_flight(problem, limits)
    pairs = []
    for numerator in (4, 5, 6, 8, 3, 2):
        cap = tuple(max(1, min(limit, -(-numerator * (count - s) // 4))) for s, limit in enumerate(most))
        pairs.append(((1,) * count, cap))
    pairs.append(((1,) * count, tuple(max(1, limit) for limit in most)))
    return list(dict.fromkeys(pairs))


class RuleSearch:
    """Random changes to the best rule so far; a change stays if the schedule gets no worse."""

    def __init__(self, scheduler: ListScheduler, most: Sequence[int], seed: int) -> None:
        self.scheduler, self.most, self.random = scheduler, most, Random(seed)
        self.rule: Rule | None = None
        self.cost: float = inf

    def try_first(self, rule: Rule, best: Listed | None) -> Listed | None:
        """The rule's schedule if it beats all before it; the rule is then where `improve` starts."""
        listed = self.scheduler.run(rule, min(self.cost, inf if best is None else best.cost))
        if listed is not None:
            self.rule, self.cost = rule, listed.cost
        return listed

    def improve(self, best: Listed, target: int, deadline_s: float, steps: int) -> Listed:
        """The best of `best` and what `steps` changes yield."""
        for _ in range(steps if self.rule is not None else 0):
            if best.cost <= target or perf_counter() > deadline_s:
                break
            rule = self._varied()
            listed = self.scheduler.run(rule, self.cost + 1)
            if listed is not None:
                self.rule, self.cost = rule, listed.cost
                best = min(best, listed, key=lambda found: found.cost)
        return best

    def _varied(self) -> Rule:
        """A rule that differs from the current one in one to three places."""
        rule, random, most = self.rule, self.random, self.most
        assert rule is not None
        hold, cap, patience, alternate = list(rule.hold), list(rule.cap), list(rule.patience), list(rule.alternate)
        recycle, turn = list(rule.recycle), list(rule.turn)
        for _ in range(random.choice((1, 1, 2, 3))):
            stage, rank, what = random.randrange(len(hold)), random.randrange(len(patience)), random.randrange(6 if len(hold) == len(patience) else 7)
            if what == 0:
                hold[stage] = max(1, min(most[stage], hold[stage] + random.choice((-1, 1))))
            elif what <= 2:
                cap[stage] = max(1, min(most[stage], cap[stage] + random.choice((-2, -1, 1, 2))))
            elif what == 3:
                patience[rank] = random.randint(-1, PATIENCE_UNIT + 1)
            elif what == 4:
                alternate[rank] = not alternate[rank]
            elif what == 5:
                recycle[rank] = not recycle[rank]
            else:
                turn[rank] = random.choice(TURNS)
        return Rule(*map(tuple, (hold, cap, patience, alternate, recycle, turn)))
