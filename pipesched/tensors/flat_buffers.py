"""Flat buffers: several tensors one after the other in one buffer, for a collective."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

__all__ = ["by_gradient_dtype", "free", "padded", "places"]


def places(tensors: Iterable[Tensor], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor with its place in a flat buffer, a view of the tensor's shape."""
    start = 0
    for tensor in tensors:
        yield tensor, buffer[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()


def free(buffer: Tensor) -> None:
    """Free the memory of a buffer that collectives have used, and that nothing else uses any more.

    On a CPU, a thread of gloo can refer to a buffer a little longer than the collective runs.
    """
    if not buffer.is_cuda:
        buffer.untyped_storage().resize_(0)


def padded(numbers: int, num_parts: int) -> int:
    """Return the length of a buffer for this many numbers that has equal parts: the next multiple of ``num_parts``."""
    return -(-numbers // num_parts) * num_parts


def by_gradient_dtype(parameters: Iterable[nn.Parameter]) -> dict[torch.dtype, list[nn.Parameter]]:
    """Group parameters by the dtype of their gradients; a parameter without a gradient counts with its own dtype."""
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
        groups.setdefault(dtype, []).append(parameter)
    return groups
