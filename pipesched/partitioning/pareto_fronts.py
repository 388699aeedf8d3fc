"""Pareto fronts: for each ideal at which a stage can end, the ideals at which the stage should start.

Without memory limits, the best start is the ideal that leaves the stage the least work. With limits, a stage can have
less work with one start, and need less memory with another. A start is dropped only if another start gives
the stage no more work and no more memory.
"""

import numpy as np
from numpy.typing import NDArray

from pipesched.partitioning.bisection import INFINITE
from pipesched.partitioning.order_ideals import Ideals
from pipesched.program.action_arrays import Ints

__all__ = ["Front"]


class Front:
    """The best starts of stages that end at the ideals of one level.

    The starts are stored in two arrays of shape (slots, starts, ideals). ``_worth`` is the cost of all blocks before
    the start. ``_memory``, used only with memory limits, is the size of these blocks in bytes.
    """

    def __init__(self, num_slots: int, *, capped: bool) -> None:
        self._worth = np.full((num_slots, 1, 1), -INFINITE)
        self._memory = np.full((num_slots, 1, 1), -1) if capped else None

    def down(self, ideals: Ideals, level: int, rows: slice) -> "Front":
        """Return the front of ``level``, the next level. Each ideal inherits the starts of the ideals that it contains.

        ``rows`` are the slots to include.
        """
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
        columns = parents[np.where(nth < counts, offsets + nth, offsets)]  # shorter lists repeat their first entry
        worth, memory = (
            of_slots[rows][:, :, columns].reshape(-1, of_slots.shape[1] * len(nth), last - first)
            for of_slots in (self._worth, self._memory)
        )
        worth, memory = _undominated(worth, memory)
        lower._worth = self._all(worth, rows, -INFINITE)
        lower._memory = self._all(memory, rows, -1)
        return lower

    def _all(self, values: Ints, rows: slice, absent: int) -> Ints:
        """Extend an array from some slots (``rows``) to all slots. The other slots get the value ``absent``."""
        every = np.full((len(self._worth), *values.shape[1:]), absent)
        every[rows] = values
        return every

    def costs(self, rows: slice, ends: Ints, least_memory: Ints | None) -> Ints:
        """Return the least cost of a stage that ends at each ideal, with shape (slots, ideals).

        The cost is INFINITE if no start is possible.

        Args:
            rows: the slots.
            ends: the cost of all blocks before the end of a stage, for each ideal at which a stage can end. The cost of
                the stage is this number minus the ``_worth`` of the stage's start.
            least_memory: the minimum size in bytes of the blocks before the start. If these blocks had fewer bytes, the
                stage would exceed the slot's memory limit.

        """
        worth = self._worth[rows]
        if self._memory is not None and least_memory is not None:
            worth = np.where(self._memory[rows] >= least_memory[:, None], worth, -INFINITE)
        best = worth.max(axis=1)
        return np.where(best > -INFINITE, ends - best, INFINITE)

    def begin(self, rows: slice, begun: NDArray[np.bool_], begins: Ints, memory: Ints | None) -> None:
        """Add new starts: the ideals of this level that the mask ``begun`` selects."""
        worth = np.where(begun, begins, -INFINITE)
        if self._memory is None or memory is None:
            self._worth[rows, 0] = np.maximum(self._worth[rows, 0], worth)
            return
        self._worth = np.concatenate([self._worth, self._all(worth[:, None], rows, -INFINITE)], axis=1)
        held = np.where(begun, memory, -1)
        self._memory = np.concatenate([self._memory, self._all(held[:, None], rows, -1)], axis=1)


def _undominated(worth: Ints, memory: Ints) -> tuple[Ints, Ints]:
    """Drop an entry along axis 1 if another is at least as good in worth and memory. Pad the rest to equal lengths."""
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
