"""The order of a step of unlike microbatches: which goes first, and an order of actions per rank, in milliseconds.

Takes   costs, and whether microbatches keep their order.
Gives   an `UnlikePlan`. Passes try orders of microbatches and rules, then changes of the best of them. Their number
        depends on the size of the problem and not on the clock: equal costs give equal plans in every process.
Raises  nothing. Source: passes and bound are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from zbfx.plan import Action, Kind, Span
from zbfx.schedule.schedule import Schedule
from zbfx.schedule.unlike.bound import unlike_bound_s
from zbfx.schedule.unlike.listing import UnlikePass, UnlikeRule, listed_pass
from zbfx.schedule.unlike.problem import Unlike

SEARCHED_ACTIONS = 16_000  # of all passes together: some 40 ms
PASSES_AT_LEAST, PASSES_AT_MOST = 4, 64


@dataclass(frozen=True)
class UnlikePlan:
    """`order`: which row of the batch each microbatch of the schedule is."""

    order: tuple[int, ...]
    schedule: Schedule


def plan_unlike(problem: Unlike, *, trains: bool = True, keep_order: bool = False) -> UnlikePlan | None:
    """The best orders found; None where no pass stays within the limits. `trains`: with Bs and Ws. `keep_order`:
    microbatches run in the order in which they come."""
    bound = 0.0
    if not trains:
        count = len(problem.placement)
        best = listed_pass(problem, given(problem), UnlikeRule((len(problem.tables),) * count), False)
    else:
        bound = unlike_bound_s(problem)
        best = best_pass(problem, keep_order, bound)
    return None if best is None else planned_by(problem, best, trains, bound)


def plan_one_by_one(problem: Unlike) -> UnlikePlan:
    """The order that holds least: one microbatch after the other on every stage, each W right after its B."""
    alone = replace(problem, limits=None)
    found = listed_pass(alone, given(alone), UnlikeRule((1,) * len(alone.placement), eager=True), True)
    assert found is not None, "nothing limits it"
    return planned_by(alone, found, True, unlike_bound_s(alone))


def planned_by(problem: Unlike, best: UnlikePass, trains: bool, bound_s: float) -> UnlikePlan:
    place = {k: position for position, k in enumerate(best.order)}
    kinds = (Kind.F, Kind.B, Kind.W)
    spans = tuple(
        tuple(Span(Action(kinds[kind], stage, place[k]), start, end) for kind, stage, k, start, end in rank)
        for rank in best.ranks
    )
    ranks = tuple(tuple(span.action for span in rank) for rank in spans)
    costs = problem.mean()
    static = [sum(float(costs.stages[s].static_bytes) for s in own) for own in problem.stages]
    peaks = tuple(peak + always for peak, always in zip(best.peaks, static, strict=True))
    name = "unlike" if trains else "unlike forward"
    schedule = Schedule(name, costs, len(problem.tables), ranks, spans, peaks, lower_bound_s=bound_s)
    return UnlikePlan(best.order, schedule)


def best_pass(problem: Unlike, keep_order: bool, bound_s: float) -> UnlikePass | None:
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
            if found.iteration_s <= bound_s * (1 + 1e-9):
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
    rules = [replace(rule, in_order=keep_order) for rule in unlike_rules(caps[0])]
    yield from ((order, rule) for order, rule in zip(orders * len(rules), rules, strict=False))
    yield from ((order, replace(rules[0], cap=cap)) for cap in caps for order in orders[:2])
    drawn = Random(0)
    for turn in range(2 * PASSES_AT_MOST):
        order = list(better[-1].order if better else given(problem))
        rule = better[-1].rule if better else replace(rules[0], cap=caps[-1])
        if turn % 4 == 3 or keep_order or m < 3:
            rule = replace(drawn.choice(rules), cap=drawn.choice(caps))
        else:
            one, other = drawn.sample(range(m), 2)
            order.insert(other, order.pop(one))
        yield tuple(order), rule


def first_orders(problem: Unlike) -> list[tuple[int, ...]]:
    """Ever longer microbatches: all ranks soon have work, and the short ones come back while the long ones are on their
    way. Or half of the shorter ones come last."""
    rising = sorted(given(problem), key=lambda k: (problem.work[k], k))
    half = len(rising) // 2
    return [tuple(rising), (*rising[:half:2], *rising[half:], *rising[1:half:2])]


def unlike_rules(cap: tuple[int, ...]) -> list[UnlikeRule]:
    return [
        UnlikeRule(cap),
        UnlikeRule(cap, patience=0.0),
        UnlikeRule(cap, heavy=-1),
        UnlikeRule(cap, share=0.3, heavy=0),
        UnlikeRule(cap, patience=1.0),
        UnlikeRule(cap, share=0.3),
        UnlikeRule(cap, heavy=0),
        UnlikeRule(cap, share=0.0),
    ]


def first_caps(problem: Unlike) -> list[tuple[int, ...]]:
    """By stage: as many as there are; in proportion to the distance from the end; as 1F1B holds."""
    count, m = len(problem.placement), len(problem.tables)
    far = [count - s for s in range(count)]
    several = max(map(len, problem.stages)) > 1
    found = [(m,) * count, tuple(min(m, 2 * d - 1 + 2 * several) for d in far), tuple(min(m, d) for d in far)]
    return list(dict.fromkeys(found))
