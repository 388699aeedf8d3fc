"""Capture: record a model's forward once, find the layers, and replay the forward stage by stage."""
