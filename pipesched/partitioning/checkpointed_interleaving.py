"""Checkpointed interleaving: chooses cuts for ranks with several stages, and an activation option for each layer.

The stages of a rank share the rank's memory. The search starts from the best cuts without recomputation or offloading,
and moves cuts while this makes the busiest rank faster. After each move, `knapsack` chooses the fastest activation
options that fit into each rank's memory.
"""

from collections.abc import Sequence
from itertools import pairwise

from pipesched.partitioning.activation_options import ActivationOption
from pipesched.partitioning.bisection import INFINITE, FoundPartition
from pipesched.partitioning.blocks import cuts_of
from pipesched.partitioning.knapsack import Knapsack
from pipesched.partitioning.problem import CutProblem

__all__ = ["CheckpointedRanks"]

_ROUNDS = 20  # maximum number of rounds; a round tries to move every cut, and a few rounds are usually enough
_STEPS = (-4, -2, -1, 1, 2, 4)

Key = tuple[int, int, int, int]
Stages = tuple[tuple[int, int], ...]  # (begin, end) of each stage of a rank


class CheckpointedRanks:
    """Computes the time and memory of each rank for cuts of one order of the blocks, and searches for better cuts."""

    def __init__(self, problem: CutProblem, order: Sequence[int]) -> None:
        self._layout = problem.layout
        self.order = list(order)
        self._members = [problem.blocks.members[block] for block in order]
        self._spans = problem.spans(order)
        self.knapsack = Knapsack(problem.options)
        transfer = problem.transfer(cuts_of(problem.blocks, order)).ticks.tolist()
        slots = problem.layout.slots
        self._transfer: list[int] = transfer if len(transfer) > 1 else [0] * (len(order) + 1)
        self._own = [[s for s, slot in enumerate(slots) if slot.rank == r] for r in range(len(problem.layout.ranks))]
        self._links = [at for at, (slot, following) in enumerate(pairwise(slots), 1) if slot.rank != following.rank]
        self._known: dict[tuple[int, Stages], tuple[int, int]] = {}

    def descended(self, cuts: list[int]) -> FoundPartition | None:
        """Move cuts one at a time while a move decreases `_key`.

        Args:
            cuts: the cuts to start from, including the start and the end of the order.

        Returns:
            The partition with its activation options, or None if the final partition does not fit into memory.

        """
        key = self._key(cuts)
        cuts = list(cuts)
        for _ in range(_ROUNDS):
            before = key
            for index in range(1, len(cuts) - 1):
                for step in _STEPS:
                    moved = [*cuts[:index], cuts[index] + step, *cuts[index + 1 :]]
                    if self._is_allowed(moved, index):
                        key, cuts = min((key, cuts), (self._key(moved), moved))
            if key == before:
                break
        return None if key[0] else self._with_choices(key[1], cuts)

    def _is_allowed(self, cuts: Sequence[int], index: int) -> bool:
        first, last = self._spans[index]
        return max(first, cuts[index - 1] + 1) <= cuts[index] <= min(last, cuts[index + 1] - 1)

    def _key(self, cuts: Sequence[int]) -> Key:
        """Return the sort key of a partition; smaller is better.

        The key consists of the number of bytes above the memory limits, the ticks of the busiest rank or link, the sum
        of the ranks' ticks, and the sum of the ranks' squared ticks.
        """
        both = [self._of_rank(rank, tuple((cuts[s], cuts[s + 1]) for s in own)) for rank, own in enumerate(self._own)]
        times = [ticks for _, ticks in both]
        busiest = max(times + [self._transfer[cuts[at]] for at in self._links])
        return sum(excess for excess, _ in both), busiest, sum(times), sum(ticks * ticks for ticks in times)

    def _of_rank(self, rank: int, stages: Stages) -> tuple[int, int]:
        """Return the number of bytes by which a rank exceeds its memory limit, and the rank's shortest time in ticks.

        If the layers do not fit with any choice of options, the time is the shortest time without the limit.
        """
        if (rank, stages) not in self._known:
            kind = self._layout.ranks[rank]
            items = self._items(rank, stages)[1]
            excess = 0
            ticks = self.knapsack.least(items, kind.limit, kind.speed)
            if ticks == INFINITE and kind.limit is not None:
                excess = self.knapsack.least_bytes(items) - kind.limit
                ticks = self.knapsack.least(items, None, kind.speed)
            self._known[rank, stages] = excess, ticks
        return self._known[rank, stages]

    def _items(self, rank: int, stages: Stages) -> tuple[list[int], list[int]]:
        """Return the layers of a rank's stages, and the knapsack item of each layer."""
        layers = []
        items = []
        for stage, (begin, end) in zip(self._own[rank], stages, strict=True):
            of_stage = [layer for block in self._members[begin:end] for layer in block]
            layers += of_stage
            items += [self.knapsack.item(layer, self._layout.slots[stage].in_flight) for layer in of_stage]
        return layers, items

    def _with_choices(self, bottleneck: int, cuts: Sequence[int]) -> FoundPartition:
        of_layer: dict[int, ActivationOption] = {}
        for rank, kind in enumerate(self._layout.ranks):
            layers, items = self._items(rank, tuple((cuts[s], cuts[s + 1]) for s in self._own[rank]))
            of_layer.update(zip(layers, self.knapsack.chosen(items, kind.limit, kind.speed), strict=True))
        return FoundPartition(
            bottleneck=bottleneck,
            order=self.order,
            ends=list(cuts[1:]),
            slots=list(self._layout.slots),
            chosen=tuple(of_layer[layer] for layer in range(len(of_layer))),
        )
