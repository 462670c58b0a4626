"""Schedules by hand: generators of orders from the literature, by name."""
