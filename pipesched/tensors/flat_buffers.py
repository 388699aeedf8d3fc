"""Flat buffers: several tensors one after the other in one buffer, for a collective."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

__all__ = ["by_gradient_dtype", "places"]


def places(tensors: Iterable[Tensor], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor with its place in a flat buffer, a view of the tensor's shape."""
    start = 0
    for tensor in tensors:
        yield tensor, buffer[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


def by_gradient_dtype(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    """Group parameters by the dtype of their gradients; a parameter without a gradient counts with its own dtype."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
        groups.setdefault(dtype, []).append(parameter)
    return groups
