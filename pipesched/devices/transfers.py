"""Transfers: moving tensors to another device."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["CUDA", "MOVES", "MOVE_NAMES", "set_data", "swap_in"]

#: The device type of NVIDIA's GPUs, and of AMD's in builds of torch for ROCm.
CUDA = "cuda"
_TYPES = ("cpu", CUDA, "xpu", "npu", "hpu", "mtia", "mps")

#: The methods of a tensor that move it to a device. Backends add theirs when they are imported.
MOVE_NAMES = frozenset({"to", *_TYPES})
MOVES: frozenset[Any] = frozenset(getattr(Tensor, name) for name in MOVE_NAMES if hasattr(Tensor, name))


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

    The tensor stays the same object with the same attributes. Raises RuntimeError if the tensor has views.
    """
    full.__class__ = type(tensor)
    full.__dict__.update(tensor.__dict__)
    full.requires_grad_(tensor.requires_grad)
    torch.utils.swap_tensors(tensor, full)
