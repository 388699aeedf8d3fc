"""Costs to predicted times, memory and bounds; the measured cost tables as data."""
