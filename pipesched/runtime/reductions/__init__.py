"""Reductions: sums the gradients of a pipeline's replicas, while the ranks compute."""
