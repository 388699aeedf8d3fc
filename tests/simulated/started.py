"""Starts the simulation when it is imported, for a process that imports pipesched afterwards."""

from tests.simulated.accelerator import start

__all__: list[str] = []

start()
