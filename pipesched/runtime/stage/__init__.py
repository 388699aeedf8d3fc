"""One stage: its forward, backward, recomputation, weights and optimizer."""
