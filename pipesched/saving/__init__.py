"""Saving: checkpoints, which can be loaded under any plan, and exported weights for other programs."""
