"""Measures layers, losses, optimizers, links and overheads."""
