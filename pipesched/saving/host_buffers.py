"""Host buffers: copies of tensors in host memory, from which an asynchronous save writes its files."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipesched.devices.memory import host_memory
from pipesched.devices.streams import current_stream, event_on, is_accelerator, new_stream, on_stream, synchronize
from pipesched.tensors.caller_context import intra_op

__all__ = ["HostBuffers", "wait_for_devices"]


def wait_for_devices(tensors: Iterable[Tensor]) -> None:
    """Wait until all work on the tensors' accelerators is done, including work on the streams of other threads."""
    for device in {tensor.device for tensor in tensors}:
        synchronize(device)


class HostBuffers:
    """Copies tensors to host memory, and reuses this memory for later copies with the same shapes and dtypes.

    Tensors on an accelerator are copied to pinned memory on a separate stream. The device's current stream waits for
    the copies, so later updates do not change the copied values. The host does not wait.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._events: list[torch.Event] = []

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start copying tensors, and return the copies, which are complete once ``wait`` returns."""
        self._buffers = {key: self._buffer(key, tensor) for key, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if is_accelerator(tensor.device)}:
            self._copy_from(device, {key: tensor for key, tensor in tensors.items() if tensor.device == device})
        with intra_op(1):  # several threads would wait for each other while the ranks keep all cores busy
            for key, tensor in tensors.items():
                if tensor.is_cpu:
                    self._buffers[key].copy_(tensor)
        return self._buffers

    def wait(self) -> None:
        """Wait until the copies are complete."""
        while self._events:
            self._events.pop().synchronize()

    def _buffer(self, key: str, tensor: Tensor) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and (known.shape, known.dtype) == (tensor.shape, tensor.dtype):
            return known
        return host_memory(tensor.shape, tensor.dtype, tensor.device)

    def _copy_from(self, device: torch.device, tensors: Mapping[str, Tensor]) -> None:
        current = current_stream(device)
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        side = self._streams[device]
        side.wait_stream(current)
        with on_stream(side):
            for key, tensor in tensors.items():
                self._buffers[key].copy_(tensor, non_blocking=True)
        event = event_on(side)
        current.wait_event(event)
        self._events.append(event)
