"""Several stages a rank, with choices for the activations of their layers: a rank's stages share its memory.

From cuts for which the busiest rank is as fast as can be where all is held, cuts are moved while that makes the busiest
rank faster, with the best choices for all layers of each rank (`knapsack`).
"""

from collections.abc import Sequence
from itertools import pairwise

from pipesched.partitioning.activation_options import ActivationOption
from pipesched.partitioning.bisection import INFINITE, Found
from pipesched.partitioning.blocks import cuts_of
from pipesched.partitioning.knapsack import Knapsack
from pipesched.partitioning.problem import Problem

__all__ = ["CheckpointedRanks"]

_ROUNDS = 20  # of moving every cut; a few are enough
_STEPS = (-4, -2, -1, 1, 2, 4)

Key = tuple[int, int, int, int]
Stages = tuple[tuple[int, int], ...]  # where each of a rank's stages begins and ends


class CheckpointedRanks:
    """One order of the blocks, and what ranks need for the stages between its cuts."""

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self._line_up = problem.line_up
        self.order = list(order)
        self._members = [problem.blocks.members[block] for block in order]
        self._spans = problem.spans(order)
        self.knapsack = Knapsack(problem.options)
        toll = problem.toll(cuts_of(problem.blocks, order)).ticks.tolist()
        slots = problem.line_up.slots
        self._toll: list[int] = toll if len(toll) > 1 else [0] * (len(order) + 1)
        self._own = [[s for s, slot in enumerate(slots) if slot.rank == r] for r in range(len(problem.line_up.ranks))]
        self._ways = [at for at, (one, other) in enumerate(pairwise(slots), 1) if one.rank != other.rank]
        self._known: dict[tuple[int, Stages], tuple[int, int]] = {}

    def descended(self, cuts: list[int]) -> Found | None:
        """The partition to which moving cuts one by one leads, with its choices; none where that is too large.

        cuts: with the first and the last.
        """
        key = self._key(cuts)
        cuts = list(cuts)
        for _ in range(_ROUNDS):
            before = key
            for index in range(1, len(cuts) - 1):
                for step in _STEPS:
                    other = [*cuts[:index], cuts[index] + step, *cuts[index + 1 :]]
                    if self._is_allowed(other, index):
                        key, cuts = min((key, cuts), (self._key(other), other))
            if key == before:
                break
        return None if key[0] else self._with_choices(key[1], cuts)

    def _is_allowed(self, cuts: Sequence[int], index: int) -> bool:
        first, last = self._spans[index]
        return max(first, cuts[index - 1] + 1) <= cuts[index] <= min(last, cuts[index + 1] - 1)

    def _key(self, cuts: Sequence[int]) -> Key:
        """Bytes too many, the ticks of the busiest rank or link, of all ranks, and their squares."""
        both = [self._of_rank(rank, tuple((cuts[s], cuts[s + 1]) for s in own)) for rank, own in enumerate(self._own)]
        times = [ticks for _, ticks in both]
        busiest = max(times + [self._toll[cuts[at]] for at in self._ways])
        return sum(excess for excess, _ in both), busiest, sum(times), sum(ticks * ticks for ticks in times)

    def _of_rank(self, rank: int, stages: Stages) -> tuple[int, int]:
        """Bytes too many on a rank, and its ticks: the least, or where that is too much with all held."""
        if (rank, stages) not in self._known:
            own = self._line_up.ranks[rank]
            items = self._items(rank, stages)[1]
            excess = 0
            ticks = self.knapsack.least(items, own.limit, own.speed)
            if ticks == INFINITE and own.limit is not None:
                excess = self.knapsack.least_bytes(items) - own.limit
                ticks = self.knapsack.least(items, None, own.speed)
            self._known[rank, stages] = excess, ticks
        return self._known[rank, stages]

    def _items(self, rank: int, stages: Stages) -> tuple[list[int], list[int]]:
        """The layers of a rank's stages, and what they are for the knapsack."""
        layers = []
        items = []
        for stage, (begin, end) in zip(self._own[rank], stages, strict=True):
            own = [layer for block in self._members[begin:end] for layer in block]
            layers += own
            items += [self.knapsack.item(layer, self._line_up.slots[stage].in_flight) for layer in own]
        return layers, items

    def _with_choices(self, bottleneck: int, cuts: Sequence[int]) -> Found:
        of_layer: dict[int, ActivationOption] = {}
        for rank, own in enumerate(self._line_up.ranks):
            layers, items = self._items(rank, tuple((cuts[s], cuts[s + 1]) for s in self._own[rank]))
            of_layer.update(zip(layers, self.knapsack.chosen(items, own.limit, own.speed), strict=True))
        return Found(
            bottleneck=bottleneck,
            order=self.order,
            ends=list(cuts[1:]),
            slots=list(self._line_up.slots),
            chosen=tuple(of_layer[layer] for layer in range(len(of_layer))),
        )
