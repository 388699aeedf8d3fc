"""The names that a file with a schedule needs to import: `schedule`, `Order`, `Shape` and the placement rules."""

from pipesched.program.order import Order, Schedule, Shape, linear, loop, schedule, v

__all__ = ["Order", "Schedule", "Shape", "linear", "loop", "schedule", "v"]
