"""Graph edges: functions that start a stage's autograd graph and find the gradient edges of its outputs."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipesched.errors import GraphError

__all__ = ["check_layouts", "edge_of", "enter"]


class _GraphEntry(torch.autograd.Function):
    """The first autograd node of a graph. The node's backward stores the gradients of the graph's inputs.

    Unlike leaf tensors, the outputs of this function may be modified in place, for example by a stage's first layer.
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


#: An argument that requires a gradient, so that the results require a gradient, too. Its gradient is always None.
_ANCHOR = torch.empty(0, device="cpu", requires_grad=True)


def enter(tensors: Sequence[Tensor], into: list[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    """Return these tensors as the inputs of a new graph. A backward writes their gradients into ``into``.

    If ``into`` is None, the gradients are dropped. ``into`` is a list instead of a callback, because a callback could
    create a reference cycle through the graph, which the garbage collector cannot free.
    """
    detached = tuple([tensor.detach() for tensor in tensors])
    try:
        entered: tuple[Tensor, ...] = _GraphEntry.apply(_ANCHOR, detached, into)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        check_layouts(tensors, "a layer of an earlier stage", error)
        raise
    return entered


def check_layouts(tensors: Iterable[Tensor], maker: str, cause: Exception | None = None) -> None:
    """Raise GraphError if torch cannot pass one of the tensors to a new graph. ``maker`` says what returned them."""
    if any(tensor.is_nested and tensor.layout is torch.strided for tensor in tensors):
        raise GraphError(
            f"layers may exchange nested tensors only in the layout torch.jagged; {maker} returns a nested tensor of "
            f"layout torch.strided, which torch cannot pass to another graph; make it with layout=torch.jagged, or "
            f"convert it with torch.nested.to_padded_tensor"
        ) from cause


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return ``get_gradient_edge(tensor)``, but faster if the tensor is the result of a built-in operation."""
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, FunctionCtx):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)
