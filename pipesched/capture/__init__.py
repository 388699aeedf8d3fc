"""Capture: record a model's forward once, find its layers, and replay the forward stage by stage."""
