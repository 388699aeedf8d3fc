"""Algorithms that write orders, each used by several schedules."""
