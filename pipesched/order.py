"""The names to import in a file that defines a schedule: `schedule`, `Order`, `Shape` and the placement rules."""

from pipesched.program.order import Order, Schedule, Shape, linear, loop, schedule, v

__all__ = ["Order", "Schedule", "Shape", "linear", "loop", "schedule", "v"]
