"""Flat buffers: stores several tensors in one contiguous buffer, for a collective."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

__all__ = ["by_gradient_dtype", "free", "padded", "places"]


def places(tensors: Iterable[Tensor], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tensor, part) pairs, where the part is a view of the flat buffer with the tensor's shape."""
    start = 0
    for tensor in tensors:
        yield tensor, buffer[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


def free(buffer: Tensor) -> None:
    """Free the memory of a CPU buffer that was used by collectives and is no longer needed.

    Dropping the last reference in Python may not free the memory immediately, because a gloo thread can keep a
    reference for a short time.
    """
    if buffer.is_cpu:
        buffer.untyped_storage().resize_(0)


def padded(numbers: int, num_parts: int) -> int:
    """Round a number of elements up to a multiple of ``num_parts``, so that a buffer can be split into equal parts."""
    return -(-numbers // num_parts) * num_parts


def by_gradient_dtype(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    """Group parameters by the dtype of their gradients. A parameter without a gradient is grouped by its own dtype."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
        groups.setdefault(dtype, []).append(parameter)
    return groups
