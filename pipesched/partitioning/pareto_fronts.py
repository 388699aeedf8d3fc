"""Pareto fronts: where below it a stage may best begin.

Without limits of memory the best begin is one number. With them a begin may spare work or spare memory, and all are
kept that no other equals in both.
"""

import numpy as np
from numpy.typing import NDArray

from pipesched.partitioning.bisection import INFINITE
from pipesched.partitioning.order_ideals import Ideals
from pipesched.program.action_arrays import Ints

__all__ = ["Front"]


class Front:
    """The begins of one level. worth, and memory where it counts: (slots, how many are kept, ideals)."""

    def __init__(self, num_slots: int, *, capped: bool) -> None:
        self._worth = np.full((num_slots, 1, 1), -INFINITE)
        self._memory = np.full((num_slots, 1, 1), -1) if capped else None

    def down(self, ideals: Ideals, level: int, rows: slice) -> "Front":
        """What the level above leaves to ``level``, for some slots."""
        above, first, last = ideals.levels[level - 1 : level + 2]
        steps = ideals.steps[first : last + 1]
        parents = ideals.parents[steps[0] : steps[-1]] - above
        offsets = steps[:-1] - steps[0]
        lower = Front(0, capped=False)
        if self._memory is None:
            best = np.maximum.reduceat(self._worth[rows, 0][:, parents], offsets, axis=1)
            lower._worth = self._all(best[:, None], rows, -INFINITE)
            return lower
        counts = np.diff(steps)
        nth = np.arange(counts.max())[:, None]
        columns = parents[np.where(nth < counts, offsets + nth, offsets)]  # the first again, where there are fewer
        worth, memory = (
            of_slots[rows][:, :, columns].reshape(-1, of_slots.shape[1] * len(nth), last - first)
            for of_slots in (self._worth, self._memory)
        )
        worth, memory = _undominated(worth, memory)
        lower._worth = self._all(worth, rows, -INFINITE)
        lower._memory = self._all(memory, rows, -1)
        return lower

    def _all(self, values: Ints, rows: slice, absent: int) -> Ints:
        """The values of some slots among those of all."""
        every = np.full((len(self._worth), *values.shape[1:]), absent)
        every[rows] = values
        return every

    def costs(self, rows: slice, ends: Ints, least_memory: Ints | None) -> Ints:
        """The least cost of a stage that ends at each ideal, (slots, ideals); INFINITE where it has no begin.

        least_memory: the memory that lies before the stage, at least.
        """
        worth = self._worth[rows]
        if self._memory is not None and least_memory is not None:
            worth = np.where(self._memory[rows] >= least_memory[:, None], worth, -INFINITE)
        best = worth.max(axis=1)
        return np.where(best > -INFINITE, ends - best, INFINITE)

    def begin(self, rows: slice, begun: NDArray[np.bool_], begins: Ints, memory: Ints | None) -> None:
        """Stages may also begin at the ideals of this level themselves, where ``begun``."""
        worth = np.where(begun, begins, -INFINITE)
        if self._memory is None or memory is None:
            self._worth[rows, 0] = np.maximum(self._worth[rows, 0], worth)
            return
        self._worth = np.concatenate([self._worth, self._all(worth[:, None], rows, -INFINITE)], axis=1)
        held = np.where(begun, memory, -1)
        self._memory = np.concatenate([self._memory, self._all(held[:, None], rows, -1)], axis=1)


def _undominated(worth: Ints, memory: Ints) -> tuple[Ints, Ints]:
    """Along axis 1, those of which no other has as much worth and as much memory; as many for each as for the most."""
    order = np.lexsort((-memory, -worth), axis=1)
    worth = np.take_along_axis(worth, order, 1)
    memory = np.take_along_axis(memory, order, 1)
    most = np.maximum.accumulate(memory, axis=1)
    kept = np.ones(worth.shape, bool)
    kept[:, 1:] = memory[:, 1:] > most[:, :-1]
    kept &= worth > -INFINITE
    worth = np.where(kept, worth, -INFINITE)
    memory = np.where(kept, memory, -1)
    most_kept = max(1, int(kept.sum(axis=1).max(initial=1)))
    order = np.argsort(~kept, axis=1, kind="stable")[:, :most_kept]
    return np.take_along_axis(worth, order, 1), np.take_along_axis(memory, order, 1)
