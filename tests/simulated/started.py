"""The simulation, started by the import: for scripts that import pipesched afterwards."""

from tests.simulated.accelerator import start

__all__ = ["ACCELERATOR"]

ACCELERATOR = start()
