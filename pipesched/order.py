"""What a file with a schedule imports."""

from pipesched.program.order import Order, Schedule, Shape, linear, loop, schedule, v

__all__ = ["Order", "Schedule", "Shape", "linear", "loop", "schedule", "v"]
