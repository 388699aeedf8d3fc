"""Effort: the remaining work of a search, counted in simulated actions.

Counting actions instead of seconds makes the plan of a profile reproducible.
"""

from collections.abc import Callable

__all__ = ["AT_LEAST", "FOR_MEMORY", "FOR_PARTITION", "IN_ORDER_SEARCH", "Effort"]

AT_LEAST = 1_000  # actions: the fixed cost of one simulation or partition
FOR_PARTITION = 100  # actions: the cost of partitioning, for each layer and each stage
FOR_MEMORY = 2  # actions: the cost of computing the ranks' memory, for each action of the program
IN_ORDER_SEARCH = 40  # actions: the cost of making a program by search, for each action of it


class Effort:
    """The effort that one search may still spend.

    Args:
        actions: the number of actions that the search may simulate.
        progress: called with the spent fraction of the effort.

    """

    def __init__(self, actions: float, progress: Callable[[float], None] = lambda _: None) -> None:
        self._all = actions
        self._progress = progress
        #: Actions that may still be simulated; negative if the search did more.
        self.left = actions

    def spend(self, actions: float) -> None:
        """Subtract finished work."""
        self.left -= actions
        self._progress(min(1.0, 1 - self.left / self._all))
