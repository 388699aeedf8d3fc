"""Copied stage: a stage of another rank whose copy this rank keeps, as the actions of a program see it."""

from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["CopiedStage", "CopyTimes", "Times"]

#: The start and the end of each action of a kind, keyed by the action's number, on the clock of the executor.
Times = Mapping[int, tuple[Any, Any]]


class CopyTimes(Protocol):
    """When the copies of one stage were brought up to date."""

    def mirrored(self) -> Times:
        """Return the times of this step's MIRROR."""

    def kept(self) -> Times:
        """Wait for this step's KEEP, and return its times."""

    def replayed(self) -> Times:
        """Return the times of this step's REPLAY."""


class CopiedStage:
    """The copy of a stage of another rank. Its updates run beside the steps, so its actions only tell when."""

    def __init__(self) -> None:
        self.copy_times: CopyTimes | None = None

    def replay(self, number: int) -> None:
        """REPLAY: the update runs again on the copy in the thread that keeps copies."""

    def replayed(self) -> Times:
        """Return the start and the end of each REPLAY of this step."""
        return {} if self.copy_times is None else self.copy_times.replayed()
