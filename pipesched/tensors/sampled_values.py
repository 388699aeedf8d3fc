"""Sampled values: a short digest of a batch, from a few values of each tensor, for ranks to compare.

A digest of all bytes of a batch would take as long as the step of a small model.
"""

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from pipesched.tensors.payload import pytree
from pipesched.tensors.tensor_attributes import is_plain

__all__ = ["digest_of_values"]

_VALUES = 8  # the number of values that are read from a tensor
_BYTES = 16
_PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None)])


@torch.no_grad()
def digest_of_values(value: Any, *, devices: bool) -> bytes:
    """Return a digest of the plain values in a nested value, and of a few values of each of its tensors.

    ``devices`` states whether tensors on devices other than the CPU are read, for which the host waits.
    """
    said = [_of_leaf(leaf, devices) for leaf in pytree.tree_leaves(value)]
    return blake2b(repr(said).encode(), digest_size=_BYTES).digest()


def _of_leaf(leaf: Any, devices: bool) -> Any:
    if isinstance(leaf, Tensor):
        is_read = leaf.device.type == "cpu" or (devices and not leaf.is_meta)
        is_strided = leaf.layout is torch.strided and not leaf.is_nested
        return _of_tensor(leaf) if is_read and is_strided and is_plain(leaf) else None
    if type(leaf) in _PLAIN:
        return leaf
    return _of_tensor(torch.from_numpy(leaf)) if _is_array(leaf) else None


def _of_tensor(tensor: Tensor) -> Any:
    if tensor.is_contiguous():
        flat = tensor.detach().view(-1)
        return flat[:: max(1, -(-flat.numel() // _VALUES))].tolist()
    shares = (_VALUES // 2, *[2] * (tensor.dim() - 1))  # how many places are read in each dim
    steps = [slice(None, None, max(1, -(-size // share))) for size, share in zip(tensor.shape, shares, strict=True)]
    return tensor.detach()[tuple(steps)].tolist()


def _is_array(leaf: Any) -> bool:
    return type(leaf).__module__ == "numpy" and type(leaf).__name__ == "ndarray" and leaf.dtype.kind in "biuf"
