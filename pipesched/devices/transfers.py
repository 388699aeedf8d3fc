"""Transfers: moving tensors to another device."""

from typing import Any

from torch import Tensor

__all__ = ["CUDA", "MOVES", "MOVE_NAMES"]

#: The device type of NVIDIA's GPUs, and of AMD's in builds of torch for ROCm.
CUDA = "cuda"
_TYPES = ("cpu", CUDA, "xpu", "npu", "hpu", "mtia", "mps")

#: The methods of a tensor that move it to a device. Backends add theirs when they are imported.
MOVE_NAMES = frozenset({"to", *_TYPES})
MOVES: frozenset[Any] = frozenset(getattr(Tensor, name) for name in MOVE_NAMES if hasattr(Tensor, name))
