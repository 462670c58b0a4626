"""Costs of microbatches that are unlike -> an order per rank, and which microbatch goes first, within milliseconds.

In: a cost table for each microbatch, what ranks may hold. Out: `UnlikePlan`.
Called by the runtime, before each step of such microbatches.
"""

from zbfx.schedule.unlike.problem import Unlike, activation_limits, limits_of_multiple
from zbfx.schedule.unlike.search import UnlikePlan, plan_one_by_one, plan_unlike

__all__ = ["Unlike", "UnlikePlan", "activation_limits", "limits_of_multiple", "plan_one_by_one", "plan_unlike"]
