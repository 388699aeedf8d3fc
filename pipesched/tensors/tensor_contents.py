"""Tensor contents: give a tensor other data, perhaps on another device, while it stays the same object."""

import torch
from torch import Tensor

from pipesched.tensors.torch_insides import hooks_kept

__all__ = ["set_data", "swap_in"]


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other data, perhaps on another device. The tensor stays the same object.

    ``tensor.data = data`` does this on one device, and between a CPU and those accelerators that torch itself supports.
    """
    try:
        tensor.data = data
    except RuntimeError:
        if tensor.device.type == data.device.type:
            raise
        swap_in(tensor, data.detach())


def swap_in(tensor: Tensor, full: Tensor) -> None:
    """Give a tensor the device and the data of ``full``, which must not be used afterwards.

    The tensor stays the same object with the same attributes and hooks. Raises RuntimeError if the tensor has views.
    """
    full.__class__ = type(tensor)
    full.__dict__.update(tensor.__dict__)
    full.requires_grad_(tensor.requires_grad)
    hooks_kept(tensor, lambda: torch.utils.swap_tensors(tensor, full))
