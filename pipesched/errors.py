"""Errors: rule; place; numbers; remedy. Each also is the built-in type that users expect."""

__all__ = [
    "ArgumentError",
    "DeadlockError",
    "DeviceCountError",
    "ExecutionError",
    "GraphError",
    "InputError",
    "MemoryLimitError",
    "ModelTypeError",
    "PartitionError",
    "PipeschedError",
    "ScheduleError",
]


class PipeschedError(Exception):
    """The base of all errors raised by pipesched."""


class GraphError(PipeschedError, ValueError):
    """The model cannot be read as a graph of layers."""


class ModelTypeError(GraphError, TypeError):
    """The model is of a kind that is not supported."""


class PartitionError(PipeschedError, ValueError):
    """The layers cannot be cut into stages as asked."""


class DeviceCountError(PartitionError, IndexError):
    """There are fewer devices than the plan needs."""


class ScheduleError(PipeschedError, ValueError):
    """A schedule or a program breaks a rule."""


class DeadlockError(ScheduleError):
    """The orders of several ranks wait for each other in a cycle."""


class MemoryLimitError(ScheduleError):
    """A rank would hold more than its limit."""


class InputError(PipeschedError, ValueError):
    """What was given to a step does not fit: inputs, target, micro-batches."""


class ArgumentError(InputError, TypeError):
    """An argument is of a type that is not taken."""


class ExecutionError(PipeschedError, RuntimeError):
    """Running a program failed for a reason that is not an exception of the user's own code."""
