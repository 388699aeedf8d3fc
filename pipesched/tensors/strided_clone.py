"""Strided clone: copies a tensor with its strides, on which kernels, and so the bits of results, depend."""

import torch
from torch import Tensor

from pipesched.tensors.tensor_attributes import is_plain

__all__ = ["strided_clone"]


def strided_clone(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of the tensor. ``Tensor.clone`` makes slices and expanded tensors contiguous."""
    is_strided = is_plain(tensor) and tensor.layout is torch.strided
    if not is_strided or torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor.clone()
    repeated = [stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    own = tensor[tuple(slice(0, 1) if again else slice(None) for again in repeated)]
    made = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device)
    made.copy_(own)
    return made.expand(tensor.shape) if any(repeated) else made
