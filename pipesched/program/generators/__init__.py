"""Generators: algorithms that write orders, each used by several schedules."""
