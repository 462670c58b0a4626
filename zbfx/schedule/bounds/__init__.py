"""Costs -> iteration times that no schedule goes below."""
