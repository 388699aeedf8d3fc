"""Linear layers whose weights are divided by columns or by rows of X W (Shoeybi et al. 2019, arXiv:1909.08053).

With columns, each rank computes its own part of the output from the whole input. With rows, each rank computes a part
of the sum of the whole output from its part of the input. A layer with rows after one with columns exchanges tensors
once: one all-reduce of the output in a forward, and one all-reduce of the input gradient in a backward.

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198), the activations outside of such a pair of layers
are divided by the positions of each sequence. The all-reduces then become an all-gather before the columns and a
reduce-scatter after the rows. The layer does not keep the gathered input: the weight gradient gathers it again.

Bytes that each of P ranks sends for an input of x bytes and an output of y bytes (whole tensors):

=======================  ====================  ==================================  =======================
layer                    F                     I                                   W
=======================  ====================  ==================================  =======================
column                   0                     2 (P - 1)/P x                       0
row                      2 (P - 1)/P y         0                                   0
column, sequence         (P - 1)/P x           (P - 1)/P x                         (P - 1)/P x
row, sequence            (P - 1)/P y           (P - 1)/P y, and for the bias       0
                                               2 (P - 1)/P of its bytes
column, gathered output  (P - 1)/P y           2 (P - 1)/P x                       0
=======================  ====================  ==================================  =======================
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched.parallel.collective_functions import (
    copy_to,
    gather_from,
    reduce_from,
    scatter_sequence,
    scatter_to,
    summed_weights,
)
from pipesched.parallel.split_module import held_by
from pipesched.parallel.tensor_group import ActivationLayout, TensorGroup
from pipesched.tensors.weight_operations import linear_rule, matmul_rule, weighted

__all__ = ["ColumnLinear", "GatheredProduct", "RowLinear", "plus", "product"]


class GatheredProduct:
    """The product of an input that is divided by positions with this rank's columns of a weight.

    A `WeightOperation`: gathers the input, scatters the sum of its gradient, and gathers the input again for the weight
    gradient.

    Args:
        group: the tensor group.
        transposed: whether the weight is (inputs, outputs), as in transformers' Conv1D, instead of (outputs, inputs).

    """

    products = 1

    def __init__(self, group: TensorGroup, *, transposed: bool) -> None:
        self._group = group
        self._transposed = transposed

    def output(self, x: Tensor, *weights: Tensor) -> Tensor:
        x = self._group.all_gather(x, self._group.sequence_dim)
        return torch.matmul(x, weights[0]) if self._transposed else functional.linear(x, weights[0])

    def input_grad(self, grad: Tensor, *weights: Tensor) -> Tensor:
        weight = weights[0].to(grad.dtype)
        partial = torch.matmul(grad, weight.t() if self._transposed else weight)
        return self._group.reduce_scatter(partial, self._group.sequence_dim)

    def weight_grads(self, grad: Tensor, x: Tensor) -> Sequence[Tensor]:
        x = self._group.all_gather(x, self._group.sequence_dim)
        return matmul_rule(grad, x) if self._transposed else linear_rule(grad, x)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool) -> Tensor:
    """Return ``x @ weight.T + bias``, or ``x @ weight + bias`` if the weight is ``transposed``."""
    if not transposed:
        return functional.linear(x, weight, bias)
    return plus(torch.matmul(x, weight), bias)


def plus(output: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias, in the dtype of the output, as in ``functional.linear`` under autocast."""
    return output if bias is None else output + bias.to(output.dtype)


class ColumnLinear(nn.Module):
    """The forward of a linear layer that holds this rank's columns."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the output, or the whole output if it is gathered."""
        held = held_by(self)
        group = held.group
        transposed = held.options["transposed"]
        if held.options["sequence"] and group.size > 1:
            output = weighted(GatheredProduct(group, transposed=transposed), x, self.weight)
            output = plus(output, self.bias)
        else:
            output = product(copy_to(x, group), self.weight, self.bias, transposed=transposed)
        if held.options["gathered"]:
            return group.returns(gather_from(output, group), ActivationLayout.WHOLE)
        return group.returns(output, ActivationLayout.DIVIDED)


class RowLinear(nn.Module):
    """The forward of a linear layer that holds this rank's rows."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor, sequence_dim: int | None = None) -> Tensor:
        """Return the whole output, or this rank's positions of it. ``sequence_dim`` is that of the group by default."""
        held = held_by(self)
        group = held.group
        if held.options["whole_input"]:
            x = scatter_to(x, group)
        partial = product(x, self.weight, transposed=held.options["transposed"])
        bias = self.bias
        layout = ActivationLayout.SEQUENCE if held.options["sequence"] else ActivationLayout.WHOLE
        if held.options["sequence"]:
            output = scatter_sequence(partial, group, group.sequence_dim if sequence_dim is None else sequence_dim)
            if bias is not None:
                (bias,) = summed_weights(group, bias)
        else:
            output = reduce_from(partial, group)
        group.layout = layout
        output = plus(output, bias)
        if group.trace is not None:
            group.trace.note(output, ActivationLayout.WHOLE, "")
        return output
