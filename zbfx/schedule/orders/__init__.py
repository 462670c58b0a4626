"""Schedules made by hand: generators of orders from the literature, by name.

In: `CostTable`, a number of microbatches. Out: `Orders`, unchecked.
Called by the planner and by the search, which starts from some of them; measures no times.
"""
