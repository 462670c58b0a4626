"""Other schedules for the costs of one, to compare it with.

Takes   a schedule, and names of others or None.
Gives   schedules.
Raises  `ZbfxError` for a name that there is not, or that these stages cannot run.
Source  ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from zbfx.errors import ZbfxError
from zbfx.schedule.orders.registry import GENERATORS
from zbfx.schedule.planner import plan
from zbfx.schedule.schedule import Schedule


def others(schedule: Schedule, names: Sequence[str] | None) -> tuple[Schedule, ...]:
    """Schedules for the same costs, without a limit on memory: of these names, or all by hand that these stages can
    run, but the given one."""
    if names is not None:
        return tuple(plan(schedule.costs, schedule.microbatches, schedule=name) for name in names)
    found = []
    for name in GENERATORS:
        try:
            other = plan(schedule.costs, schedule.microbatches, schedule=name)
        except ZbfxError:  # it needs another placement, or more microbatches
            continue
        if other.ranks != schedule.ranks:
            found.append(other)
    return tuple(found)
