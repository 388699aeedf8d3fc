"""Saving: checkpoints of a run, which load under any plan, and weights for other programs."""
