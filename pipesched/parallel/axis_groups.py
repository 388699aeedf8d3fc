"""Axis groups: the groups of ranks along the axes of a layout in two, two and a half or three dimensions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from pipesched.parallel.process_groups import own_group, release_with
from pipesched.parallel.tensor_group import ActivationLayout, Division, JobGroups, TensorGroup
from pipesched.simulation.tensor_layout import Axis, BlockAxes, TensorLayout

__all__ = ["AxisGroups"]

_TIMEOUT_S = 600.0  # of groups outside of a pipeline


class AxisGroups:
    """The ranks of a tensor group as a grid, and a group of the ranks along each axis.

    Args:
        group: the tensor group of this process. It gets this grid as its ``grid``.
        layout: the layout, of two or more dimensions, for as many ranks.

    Attributes:
        group: the tensor group.
        layout: the layout.
        hidden_parts: the number of parts into which hidden units are divided inside a pair of linear layers.
        own_rows: the rows of this rank's block where activations were divided last; 0 before.

    """

    def __init__(self, group: TensorGroup, layout: TensorLayout) -> None:
        self.group = group
        self.layout = layout
        inner = layout.linear(second=False).y
        self._blocks = {ActivationLayout.OUTER: layout.outer, ActivationLayout.INNER: inner}
        self.own_rows = 0
        self.hidden_parts = layout.length(inner.columns)
        every = [*((axis,) for axis in layout.axes), layout.outer.rows, inner.rows]
        self._groups = {axes: self._made(axes) for axes in dict.fromkeys(every)}
        group.grid = self

    def _made(self, axes: Sequence[Axis]) -> TensorGroup:
        """Return the group of the ranks that differ along these axes. Collective over all ranks of the job."""
        whole = self.group
        layout = self.layout
        ranks = layout.peers(whole.rank, axes)
        process_group: Any = None
        if whole.process_group is not None and len(ranks) > 1:
            parts = {tuple(layout.peers(rank, axes)) for rank in range(layout.size)}
            job = whole.job or JobGroups([distributed.get_process_group_ranks(whole.process_group)], _TIMEOUT_S)
            every = [[group[rank] for rank in part] for group in job.groups for part in sorted(parts)]
            process_group = own_group(every, job.timeout_s, new=True)
            release_with(self, process_group)
        return whole.part(process_group, rank=ranks.index(whole.rank), size=len(ranks), name=" x ".join(axes))

    def over(self, axes: Sequence[Axis]) -> TensorGroup:
        """Return the group of the ranks that differ along these axes only."""
        return self._groups[tuple(axes)]

    def blocks(self, layout: ActivationLayout) -> BlockAxes:
        """Return the axes that divide activations with this layout."""
        return self._blocks[layout]

    def divisions(self, layout: ActivationLayout, hidden: int) -> list[Division]:
        """Return how activations are divided whose hidden units or heads lie in the dimension ``hidden``."""
        blocks = self.blocks(layout)
        rank = self.group.rank
        return [
            Division(dim, self.layout.place(rank, axes), self.layout.length(axes))
            for dim, axes in ((0, blocks.rows), (hidden, blocks.columns))
        ]

    def own(self, tensor: Tensor, layout: ActivationLayout) -> Tensor:
        """Return this rank's block of whole activations. Not collective.

        Raises InputError if the rows or the hidden units are not divided evenly.
        """
        blocks = self.blocks(layout)
        return self.over(blocks.columns).own(self.over(blocks.rows).own(tensor, 0), -1)

    def whole(self, block: Tensor, layout: ActivationLayout) -> Tensor:
        """Return whole activations, given the blocks of all ranks. Collective."""
        blocks = self.blocks(layout)
        with torch.no_grad():
            return self.over(blocks.rows).all_gather(self.over(blocks.columns).all_gather(block, -1), 0)
