"""Generators of orders, which several schedules share."""
