"""Divided outputs: the outputs of a model, such as logits, of which each rank of a tensor group holds a block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.tensors.payload import pytree

__all__ = ["DividedOutputs"]


@dataclass(frozen=True)
class DividedOutputs:
    """Gathers the outputs of a model for metrics, and for the user.

    Attributes:
        group: the tensor group.
        blocks: the layout, and the dimension of the hidden units or classes, by the number of the output's leaf.

    """

    group: TensorGroup
    blocks: Mapping[int, tuple[ActivationLayout, int]]

    @torch.no_grad()
    def whole(self, output: Any) -> Any:
        """Return the whole output, given this rank's. Collective if some of the output is divided."""
        leaves, spec = pytree.tree_flatten(output)
        for place, (layout, dim) in self.blocks.items():
            if place < len(leaves) and isinstance(leaves[place], Tensor):
                leaves[place] = self._gathered(leaves[place], layout, dim)
        return pytree.tree_unflatten(leaves, spec)

    def _gathered(self, block: Tensor, layout: ActivationLayout, dim: int) -> Tensor:
        grid = self.group.grid
        if not isinstance(grid, AxisGroups):
            return self.group.all_gather(block, dim)
        axes = grid.blocks(layout)
        return grid.over(axes.rows).all_gather(grid.over(axes.columns).all_gather(block, dim), 0)
