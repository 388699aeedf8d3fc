"""Graph edges: where a stage's autograd graph begins and where it ends."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["edge_of", "enter"]


class _Entry(torch.autograd.Function):
    """Where a graph begins: tensors of which only their gradients' way out is known.

    Unlike a leaf, what comes out may be modified in place, as the first layer of a stage may do.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tensors: tuple[Tensor, ...], into: list[Tensor | None] | None
    ) -> tuple[Tensor, ...]:
        ctx.into = into
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        if ctx.into is not None:
            ctx.into[:] = grads
        return None, None, None


#: What a graph begins with needs a gradient where one of its node's arguments does; no gradient ever comes to this one.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def enter(tensors: Sequence[Tensor], into: list[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    """The same tensors, now requiring gradients, which a backward writes into ``into`` (None: not used).

    A list, and no callback: who holds the graph must not be held by it, since no garbage collector sees through graphs.
    """
    detached = tuple([tensor.detach() for tensor in tensors])
    entered: tuple[Tensor, ...] = _Entry.apply(_ANCHOR, detached, into)  # type: ignore[no-untyped-call]
    return entered


def edge_of(tensor: Tensor) -> GradientEdge:
    """As ``get_gradient_edge``, whose care leaves and nodes of Python alone need."""
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)
