"""Generators of orders that several schedules share."""
