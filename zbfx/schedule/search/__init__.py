"""Costs and a limit -> good orders: list scheduling, local search, refinement."""
