"""Simulation: predicts the time and memory of programs from costs; cost tables as plain data."""
