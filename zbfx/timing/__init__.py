"""Orders of actions and their costs -> when each action runs, what is held meanwhile, and whether a rule is broken.

In: `CostTable`, a number of microbatches, an order of `Action`s per rank, a memory limit. Out: `Timeline`, spans.
Called by pictures and by the planner; knows neither names of schedules nor how orders are found.
"""
