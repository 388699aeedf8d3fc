"""Coordination: how ranks in different processes meet, and how they detect that one of them failed."""
