"""Gradients between the last backward and the update: norms, clipping, loss scale, and checks that all are finite."""
