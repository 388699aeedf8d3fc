"""Gradients: sums, norms, clipping, loss scaling and checks for infinite or NaN values, before the update."""
