"""Effort: how much a search may still do, counted in actions that could have been simulated.

It is not counted in seconds, so that a profile always gives the same plan.
"""

from collections.abc import Callable

__all__ = ["AT_LEAST", "FOR_MEMORY", "FOR_PARTITION", "IN_ORDER_SEARCH", "Effort"]

AT_LEAST = 1_000  # actions that could be simulated in the time that any one simulation or partition takes
FOR_PARTITION = 100  # ... while layers are partitioned, for each of them and of the stages
FOR_MEMORY = 2  # ... while it is found what ranks need in memory, for each action
IN_ORDER_SEARCH = 40  # ... while an order that is searched for gets one more action


class Effort:
    """What one search may still do. left: actions that may still be simulated; below 0 where more was done.

    progress: is told the share of the effort that is spent.
    """

    def __init__(self, actions: float, progress: Callable[[float], None] = lambda _: None) -> None:
        self._all = actions
        self._progress = progress
        self.left = actions

    def spend(self, actions: float) -> None:
        """Count what was done."""
        self.left -= actions
        self._progress(min(1.0, 1 - self.left / self._all))
