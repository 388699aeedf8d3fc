"""Gradients between the last backward and the update: norms, clipping, loss scale and nonfinite checks."""
