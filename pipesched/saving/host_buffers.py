"""Host buffers: copies of tensors in host memory, from which an asynchronous save writes its files."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipesched.devices.memory import host_memory
from pipesched.devices.streams import current_stream, event_on, is_accelerator, new_stream, on_stream, synchronize
from pipesched.saving.tensor_files import file_order
from pipesched.saving.whole_tensors import NO_WHOLE_TENSORS, WholeTensors
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

    def copied(self, tensors: Mapping[str, Tensor], wholes: WholeTensors = NO_WHOLE_TENSORS) -> dict[str, Tensor]:
        """Start copying tensors, and return the copies, which are complete once ``wait`` returns.

        ``wholes`` makes the whole tensors of those that are blocks. Default: none are.
        """
        self.reserve(tensors, wholes)
        own = {key: tensor for key, tensor in tensors.items() if key not in wholes}
        for device in {tensor.device for tensor in own.values() if is_accelerator(tensor.device)}:
            self._copy_from(device, {key: tensor for key, tensor in own.items() if tensor.device == device})
        with intra_op(1):  # several threads would wait for each other while the ranks keep all cores busy
            for key in file_order(tensors):
                if tensors[key].is_cpu or key in wholes:
                    self._buffers[key].copy_(wholes.get(key, tensors[key]))
        return self._buffers

    def reserve(self, tensors: Mapping[str, Tensor], wholes: WholeTensors = NO_WHOLE_TENSORS) -> None:
        """Allocate the memory of the copies, and release all other memory. The arguments are those of ``copied``."""
        self._buffers = {key: self._buffer(key, tensor, wholes.shape(key, tensor)) for key, tensor in tensors.items()}

    def wait(self) -> None:
        """Wait until the copies are complete."""
        while self._events:
            self._events.pop().synchronize()

    def _buffer(self, key: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and (known.shape, known.dtype) == (shape, tensor.dtype):
            return known
        return host_memory(torch.Size(shape), tensor.dtype, tensor.device)

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
