"""Blocked products: Y = X W where the ranks of a grid hold blocks of X, W and Y.

`pipesched.simulation.tensor_layout` says which rank holds which block, and counts what the actions exchange.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.simulation.tensor_layout import LinearBlocks
from pipesched.tensors.weight_operations import WeightOperation, linear_rule

__all__ = ["GatheredBlocks", "PanelProduct", "blocked_product"]


def blocked_product(grid: AxisGroups, *, second: bool, transposed: bool) -> WeightOperation:
    """Return the product of the first or the second linear layer of a pair.

    Args:
        grid: the ranks.
        second: whether the layer is the second of a pair.
        transposed: whether the weight is (inputs, outputs), as in transformers' Conv1D, instead of (outputs, inputs).

    """
    blocks = grid.layout.linear(second=second)
    return (PanelProduct if blocks.panels else GatheredBlocks)(grid, blocks, transposed=transposed)


class _Blocked:
    """A product whose weight may be transposed. Below, it is always (outputs, inputs)."""

    def __init__(self, grid: AxisGroups, blocks: LinearBlocks, *, transposed: bool) -> None:
        assert blocks.gathered_x is not None
        assert blocks.gathered_weight is not None
        self._of_x = grid.over([blocks.gathered_x])
        self._of_weight = grid.over([blocks.gathered_weight])
        self._of_y: TensorGroup | None = None if blocks.scattered_y is None else grid.over([blocks.scattered_y])
        self._summed = None if blocks.summed_weight is None else grid.over([blocks.summed_weight])
        self._transposed = transposed
        #: Each rank multiplies the blocks that it gathers, or the panels that it gets.
        self.products = self._of_x.size * (1 if blocks.panels else self._of_weight.size)

    def _matrix(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return (weight.t() if self._transposed else weight).to(dtype)

    def _grad(self, matrix: Tensor) -> tuple[Tensor]:
        return (matrix.t().contiguous() if self._transposed else matrix,)


class GatheredBlocks(_Blocked):
    """The product of a layout in three dimensions (Bian et al. 2021, arXiv:2105.14450). A `WeightOperation`.

    The forward gathers rows of X and inputs of W, and scatters the sum of Y by rows. The backward gathers what the
    forward scattered, and scatters what it gathered.
    """

    def output(self, x: Tensor, *weights: Tensor) -> Tensor:
        x = self._of_x.all_gather(x, 0)
        weight = self._of_weight.all_gather(self._matrix(weights[0], weights[0].dtype), 1)
        return self._over_y.reduce_scatter(functional.linear(x, weight), 0)

    def input_grad(self, grad: Tensor, *weights: Tensor) -> Tensor:
        grad = self._over_y.all_gather(grad, 0)
        weight = self._of_weight.all_gather(self._matrix(weights[0], grad.dtype), 1)
        return self._of_x.reduce_scatter(torch.matmul(grad, weight), 0)

    def weight_grads(self, grad: Tensor, x: Tensor) -> Sequence[Tensor]:
        grad = self._over_y.all_gather(grad, 0)
        x = self._of_x.all_gather(x, 0)
        return self._grad(self._of_weight.reduce_scatter(linear_rule(grad, x)[0], 1))

    @property
    def _over_y(self) -> TensorGroup:
        assert self._of_y is not None
        return self._of_y


class PanelProduct(_Blocked):
    """The product of a layout in two, or two and a half dimensions: SUMMA (van de Geijn and Watts 1997).

    A `WeightOperation`. In each of q steps, one column of ranks broadcasts its blocks of X along the rows of the grid,
    and one row of ranks its blocks of W along the columns. The backward reduces panels of gradients to the ranks that
    own them. So a rank holds one block of another rank at a time. With depth, each layer of the grid does this for its
    own rows of X, and the gradients of W are added over the layers.
    """

    def output(self, x: Tensor, *weights: Tensor) -> Tensor:
        weight = self._matrix(weights[0], weights[0].dtype)
        output: Tensor | None = None
        for panel in range(self._of_x.size):
            product = functional.linear(self._of_x.broadcast(x, panel), self._of_weight.broadcast(weight, panel))
            output = product if output is None else output.add_(product)
        assert output is not None
        return output

    def input_grad(self, grad: Tensor, *weights: Tensor) -> Tensor:
        weight = self._matrix(weights[0], grad.dtype)
        return _reduced(
            self._of_x, lambda panel: torch.matmul(grad, self._of_weight.broadcast(weight, panel)), self._of_x.size
        )

    def weight_grads(self, grad: Tensor, x: Tensor) -> Sequence[Tensor]:
        own = _reduced(
            self._of_weight, lambda panel: linear_rule(grad, self._of_x.broadcast(x, panel))[0], self._of_x.size
        )
        return self._grad(own if self._summed is None else self._summed.all_reduce(own))


def _reduced(group: TensorGroup, product: Any, panels: int) -> Tensor:
    """Add each panel over the ranks of a group, and return the panel that this rank owns."""
    own: Tensor | None = None
    for panel in range(panels):
        total = group.reduce(product(panel), panel)
        own = total if total is not None else own
    assert own is not None
    return own
