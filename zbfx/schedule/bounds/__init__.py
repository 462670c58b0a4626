"""Costs -> iteration times that no schedule goes below, each with its argument.

In: `CostTable`, a number of microbatches, a limit per rank. Out: `Certificate`.
Called by the search, which stops where a bound is met, and by the planner; builds no schedule.
"""
