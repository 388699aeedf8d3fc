"""Measure layers, losses, optimizers, links and overheads."""
