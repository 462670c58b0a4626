"""The planner: per rank an order of F, B and W under a memory limit, timed, checked, and with a proven lower bound.

In: `CostTable`, a number of microbatches, a memory limit, a name or orders. Out: `Schedule`.
Called by the compiler, the command line and users; knows neither torch nor models.
"""

from zbfx.schedule.building import list_schedule, place_ws, repeat_block, squeeze
from zbfx.schedule.orders.registry import ANY, LINEAR, LOOPED, Shape, V, improve, names, register
from zbfx.schedule.orders.written import from_torch_csv
from zbfx.schedule.planner import build, plan
from zbfx.schedule.schedule import Schedule
from zbfx.timing.simulate import Timeline, simulate
from zbfx.timing.validity import check

__all__ = [
    "ANY",
    "LINEAR",
    "LOOPED",
    "Schedule",
    "Shape",
    "Timeline",
    "V",
    "build",
    "check",
    "from_torch_csv",
    "improve",
    "list_schedule",
    "names",
    "place_ws",
    "plan",
    "register",
    "repeat_block",
    "simulate",
    "squeeze",
]
