"""For generators of schedules: pieces from which orders are made.

Takes   a cost table, a number of microbatches, orders or a block of one microbatch; limits as generators
        get them, or as `plan` takes them.
Gives   an order of actions per rank, which keeps the limits.
Raises  `ZbfxError` where no order comes out.
Source  list scheduling: section 3.1 of the paper. Repeated blocks: Qi et al. 2024, "Pipeline Parallelism with
        Controllable Memory". `squeeze`: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from zbfx.errors import ZbfxError
from zbfx.plan import CostTable
from zbfx.schedule.orders.handmade import Orders
from zbfx.schedule.orders.repeated import repeat_block
from zbfx.schedule.search.fusing import evaluated, unfuse
from zbfx.schedule.search.list_scheduling import Listed, ListScheduler
from zbfx.schedule.search.rules import PATIENCE_UNIT, Rule, Turn
from zbfx.timing.exact import Instance, instance
from zbfx.timing.limits import MemLimit, limit_per_rank, require_feasible
from zbfx.timing.validity import check

__all__ = ["list_schedule", "place_ws", "repeat_block", "squeeze"]

Value = TypeVar("Value", int, float)


def list_schedule(
    costs: CostTable,
    microbatches: int,
    limits: MemLimit = None,
    *,
    hold: int | Sequence[int] = 1,
    cap: int | Sequence[int] | None = None,
    patience: float | Sequence[float] = 1.0,
    alternate: bool = False,
    recycle: bool = False,
) -> Orders:
    """List scheduling: whenever a rank is free it takes a B that has arrived, else an F that has arrived and fits, else
    a W. `hold`: Fs of a stage before its first B; `cap`: Fs of a stage without their B at most, None: as many as fit;
    each a number, or one per stage. `patience`, or one per rank: a W starts only if the next F or B is at least this
    part of it away. `alternate`: after a B an F goes before the next B. `recycle`: a W goes before a B where an F waits
    for its memory."""
    scheduler, _ = scheduler_of(costs, microbatches, limits)
    count, p = len(costs.stages), costs.rank_count
    rule = Rule(
        hold=per(hold, count, "hold", "stage"),
        cap=per(microbatches if cap is None else cap, count, "cap", "stage"),
        patience=tuple(round(PATIENCE_UNIT * share) for share in per(patience, p, "patience", "rank")),
        alternate=(alternate,) * p,
        recycle=(recycle,) * p,
        turn=(Turn.LATER,) * p,
    )
    listed = scheduler.run(rule)
    if listed is None:
        raise ZbfxError("list scheduling gets stuck under this limit: lower hold and cap, or raise the limit")
    return scheduler.problem.decode(listed.orders)


def place_ws(
    costs: CostTable, microbatches: int, orders: Orders, limits: MemLimit = None, *, patience: float = 1.0
) -> Orders:
    """Every rank's Fs and Bs in their order, and its Ws placed anew: where the rank would wait for at least `patience`
    times a W, where the next action needs their memory, and at the end. A BW becomes its B and its W."""
    scheduler, coded = scheduler_of(costs, microbatches, limits, orders)
    listed = scheduler.refill(coded, [round(PATIENCE_UNIT * patience)] * len(coded))
    if listed is None:
        raise ZbfxError("Fs and Bs in this order do not fit the memory limit, wherever the Ws go")
    return scheduler.problem.decode(listed.orders)


def squeeze(costs: CostTable, microbatches: int, orders: Orders, limits: MemLimit = None) -> Orders:
    """The orders with their gaps closed: a rank that would wait runs the first of its later actions that can start, if
    the memory limit holds throughout. A BW becomes its B and its W. The orders come back as they are where nothing is
    gained."""
    scheduler, coded = scheduler_of(costs, microbatches, limits, orders)
    units = scheduler.problem.units(limit_per_rank(costs, limits))
    given = evaluated(scheduler.problem, scheduler.problem.encode(orders), units)
    squeezed = scheduler.squeeze(coded)
    better = [found for found in (given, squeezed) if found is not None]
    if not better:
        raise ZbfxError("this order does not fit the memory limit, and no action can be moved so that it does")
    return scheduler.problem.decode(min(better, key=cost_of).orders)


def cost_of(listed: Listed) -> int:
    return listed.cost


def scheduler_of(
    costs: CostTable, microbatches: int, limits: MemLimit, orders: Orders | None = None
) -> tuple[ListScheduler, list[list[int]]]:
    """A list scheduler, and the codes of `orders` with every BW apart. Raises `InvalidSchedule` for incorrect ones."""
    problem: Instance = instance(costs, microbatches)
    per_rank = limit_per_rank(costs, limits)
    require_feasible(costs, per_rank)
    coded: list[list[int]] = []
    if orders is not None:
        check(costs, microbatches, orders)
        coded = [unfuse(problem, order) for order in problem.encode(orders)]
    return ListScheduler(problem, problem.units(per_rank)), coded


def per(value: Value | Sequence[Value], count: int, name: str, unit: str) -> tuple[Value, ...]:
    """One value for each of `count` units."""
    if not isinstance(value, Sequence):
        return (value,) * count
    if len(value) != count:
        raise ZbfxError(f"{name} is a number, or one per {unit}: expected {count}, found {len(value)}")
    return tuple(value)
