"""All exceptions that pipesched raises. Each class also inherits from the matching built-in class, such as ValueError.

Every message states four facts in this order: the rule, the place that breaks the rule, the values there, and the
remedy.
"""

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "DamagedCheckpointError",
    "DeadlockError",
    "DeviceCountError",
    "DifferenceError",
    "ExecutionError",
    "GraphError",
    "InputError",
    "MemoryLimitError",
    "MissingCheckpointError",
    "ModelTypeError",
    "PartitionError",
    "PipeschedError",
    "RankLost",
    "ScheduleError",
    "TorchVersionError",
]


class PipeschedError(Exception):
    """Base class of all errors raised by pipesched."""


class GraphError(PipeschedError, ValueError):
    """The model cannot be captured as a graph of layers."""


class ModelTypeError(GraphError, TypeError):
    """The model, or a function passed with it, is of an unsupported type."""


class PartitionError(PipeschedError, ValueError):
    """The layers cannot be divided into the requested stages."""


class DeviceCountError(PartitionError, IndexError):
    """There are fewer devices than the plan needs."""


class ScheduleError(PipeschedError, ValueError):
    """A schedule or a program breaks a rule."""


class DeadlockError(ScheduleError):
    """Several ranks wait for each other in a cycle."""


class MemoryLimitError(ScheduleError):
    """A rank would exceed its memory limit."""


class InputError(PipeschedError, ValueError):
    """An input, a target or an option has an invalid value."""


class ArgumentError(InputError, TypeError):
    """An argument has the wrong type."""


class ExecutionError(PipeschedError, RuntimeError):
    """A pipeline failed while running, for a reason other than an exception in the user's code."""


class RankLost(ExecutionError):  # noqa: N818  not a fault of this rank: the job may go on
    """A rank of a mesh is lost, and the pipeline keeps copies of states. ``pipe.recover()`` goes on without the rank.

    Raised only with ``Distributed(redundancy=...)``.
    """


class DifferenceError(PipeschedError, ArithmeticError):
    """A pipeline's results differ from the results of its model. Raised by ``Pipeline.check``."""


class CheckpointError(PipeschedError, RuntimeError):
    """A checkpoint cannot be written, or does not fit the pipeline that loads it."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or damaged: a file is missing or truncated, or does not match its hash."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the given path."""


class TorchVersionError(PipeschedError, ImportError):
    """The installed version of torch lacks a part that pipesched needs."""
