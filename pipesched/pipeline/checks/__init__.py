"""Checks while a pipeline is made: of layers that are recomputed or copied, and of replicas."""
