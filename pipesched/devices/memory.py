"""Memory: the memory of an accelerator, and host memory from which and to which an accelerator copies."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipesched.devices.streams import is_accelerator, synchronize

__all__ = ["allocated_bytes", "begin_peak", "host_copy", "host_memory", "peak_bytes"]


def allocated_bytes(device: torch.device) -> int:
    """Return the size of the tensors on an accelerator, in bytes."""
    return int(torch.get_device_module(device).memory_allocated(device))


def peak_bytes(device: torch.device) -> int:
    """Return the maximum of `allocated_bytes` since `begin_peak`."""
    return int(torch.get_device_module(device).max_memory_allocated(device))


def begin_peak(device: torch.device) -> None:
    """Wait for an accelerator, and reset its peak to the memory in use."""
    synchronize(device)
    torch.get_device_module(device).reset_peak_memory_stats(device)


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor on the host, to which ``device`` can copy without the host waiting.

    For an accelerator the memory is pinned.
    """
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_accelerator(device))


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy of an accelerator's tensor on the host, which is complete once the current stream has made it."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
