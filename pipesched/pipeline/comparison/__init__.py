"""Comparison of a pipeline with its model in plain PyTorch, for ``Pipeline.check``."""
