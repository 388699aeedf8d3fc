"""Capture: records a model's forward once, finds the layers, and replays the forward stage by stage."""
