"""Collective functions: collectives between layers, whose gradients are collectives, too.

============== ================= =======================
function       forward           backward
============== ================= =======================
copy_to        -                 all-reduce
reduce_from    all-reduce        -
gather_from    all-gather        own block
scatter_to     own block         all-gather
gather_seq...  all-gather        reduce-scatter
scatter_seq... reduce-scatter    all-gather
============== ================= =======================

A value that all ranks hold has a whole gradient on each rank. A value that each rank uses for its own block of a layer
has a part of its gradient on each rank, until an all-reduce or a reduce-scatter adds these parts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipesched.parallel.tensor_group import TensorGroup

__all__ = [
    "copy_to",
    "exchanged",
    "gather_from",
    "gather_sequence",
    "reduce_from",
    "scatter_sequence",
    "scatter_to",
    "summed_weights",
]


#: Exchanges a tensor between the ranks of a tensor group.
_Exchange = Callable[[Tensor], Tensor]


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, again: tuple[Tensor, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return again

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if len(grads) == 1:
            return None, None, ctx.group.all_reduce(grads[0])
        total = ctx.group.all_reduce(torch.cat([grad.reshape(-1) for grad in grads]))
        parts = total.split([grad.numel() for grad in grads])
        return None, None, *(part.view(grad.shape) for part, grad in zip(parts, grads, strict=True))


class _Exchanged(torch.autograd.Function):
    """Applies a function of the group to a tensor in the forward, and another one to its gradient in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: _Exchange, back: _Exchange) -> Tensor:
        ctx.back = back
        return there(x).data  # no view, which code after the layer could not change in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None, None


def copy_to(x: Tensor, group: TensorGroup) -> Tensor:
    """Return a copy of a whole tensor for the blocks of a layer. Its gradient is the sum over all ranks.

    Layers that take the same tensor, such as those of queries, keys and values, get the same copy. So the gradient is
    summed once.
    """
    if group.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    shared = group.shared
    if shared is not None and shared[0] is x and shared[1] == x._version:
        return shared[2]
    copy: Tensor
    (copy,) = _CopyTo.apply(group, (x.detach(),), x)  # type: ignore[no-untyped-call]
    group.shared = x, x._version, copy
    return copy


def summed_weights(group: TensorGroup, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return copies of whole weights that each rank applies to its own block of the activations.

    The gradient of each weight is the sum over all ranks; one all-reduce adds the gradients of all these weights.
    """
    if group.size == 1 or not torch.is_grad_enabled():
        return weights
    trained = [weight for weight in weights if weight.requires_grad]
    if not trained:
        return weights
    again = tuple(weight.detach() for weight in trained)
    copies = iter(_CopyTo.apply(group, again, *trained))  # type: ignore[no-untyped-call]
    return tuple(next(copies) if weight.requires_grad else weight for weight in weights)


def reduce_from(x: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of a tensor over all ranks."""
    return exchanged(x, group, group.all_reduce, _unchanged)


def gather_from(x: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """Return the whole of a divided tensor. All ranks use it in the same way, so its gradient is whole on each rank."""
    return exchanged(x, group, lambda own: group.all_gather(own, dim), lambda grad: group.own(grad, dim).contiguous())


def scatter_to(x: Tensor, group: TensorGroup, dim: int = -1) -> Tensor:
    """Return this rank's block of a whole tensor.

    Raises InputError if the dimension is not divided evenly.
    """
    return exchanged(x, group, lambda whole: group.own(whole, dim).clone(), lambda grad: group.all_gather(grad, dim))


def gather_sequence(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return all positions of sequences that are divided, for the blocks of a layer."""
    return exchanged(x, group, lambda own: group.all_gather(own, dim), lambda grad: group.reduce_scatter(grad, dim))


def scatter_sequence(x: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return this rank's positions of the sum of a tensor over all ranks.

    Raises InputError if the number of positions is not divided evenly.
    """
    return exchanged(x, group, lambda part: group.reduce_scatter(part, dim), lambda grad: group.all_gather(grad, dim))


def _unchanged(grad: Tensor) -> Tensor:
    return grad


def exchanged(x: Tensor, group: TensorGroup, there: _Exchange, back: _Exchange) -> Tensor:
    """Return what ``there`` makes of a tensor. ``back`` makes its gradient of that of the output."""
    if group.size == 1:
        return x
    output: Tensor = _Exchanged.apply(x, there, back)  # type: ignore[no-untyped-call]
    return output
