"""Simulation: predicts the step time and memory of programs from measured or assumed costs."""
