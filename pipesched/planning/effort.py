"""Effort: the remaining work of a search, counted in simulated actions.

Counting actions instead of seconds makes the plan for a profile reproducible.
"""

from collections.abc import Callable

from pipesched.progress import advance

__all__ = ["AT_LEAST", "FOR_MEMORY", "FOR_PARTITION", "IN_ORDER_SEARCH", "SearchEffort"]

AT_LEAST = 1_000  # fixed cost of one simulation or partition, in actions
FOR_PARTITION = 100  # cost of partitioning, per layer and per stage, in actions
FOR_MEMORY = 2  # cost of computing the ranks' memory per action of the program, in actions
IN_ORDER_SEARCH = 40  # cost of finding a program's order by search, per action of the program, in actions


class SearchEffort:
    """The remaining effort of one search.

    Args:
        actions: the number of actions that the search is allowed to simulate.
        progress: called with the fraction of the effort that has been spent.

    """

    def __init__(self, actions: float, progress: Callable[[float], None] = lambda _: None) -> None:
        self._all = actions
        self._progress = progress
        #: The number of actions left to simulate; negative once the search has exceeded its effort.
        self.left = actions

    def spend(self, actions: float) -> None:
        """Subtract finished work from the remaining effort."""
        self.left -= actions
        advance()
        self._progress(min(1.0, 1 - self.left / self._all))
