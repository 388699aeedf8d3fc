"""Profiling: measures the costs of layers, losses and optimizers, the links between ranks, and overheads."""
