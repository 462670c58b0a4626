"""The planner: per rank an order of F, B and W under a memory limit, timed, checked, and with a proven lower bound.

In: `CostTable`, a number of microbatches, a memory limit, a name or orders. Out: `Schedule`.
Called by the compiler, the command line and users; knows neither torch nor models.
"""

from zbfx.schedule.orders.registry import names, register
from zbfx.schedule.planner import build, plan
from zbfx.schedule.schedule import Schedule
from zbfx.timing.simulate import Timeline, simulate
from zbfx.timing.validity import check

__all__ = ["Schedule", "Timeline", "build", "check", "names", "plan", "register", "simulate"]
