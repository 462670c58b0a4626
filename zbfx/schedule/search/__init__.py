"""Costs and a limit -> good orders: list scheduling, local search, refinement by integer programs.

In: `CostTable`, a number of microbatches, a limit per rank, a seed, a deadline. Out: `Found`.
Called by the planner; its orders are checked there like any others.
"""
