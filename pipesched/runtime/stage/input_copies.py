"""Input copies: bring the tensors of a batch to the device of a stage, while the device computes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipesched.devices.memory import host_copy
from pipesched.devices.streams import current_stream, event_on, is_accelerator, new_stream, on_stream, used_here
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.payload import Payload

__all__ = ["InputCopies"]


class InputCopies:
    """Copies tensors of a batch from the host or from other devices to one device.

    The copies run on streams of their own: one stream for each device from which tensors come, and one for the copies
    that arrive. A copy from the host waits for no computation.

    Args:
        device: the device to which the tensors are copied.

    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[torch.device, torch.Stream] = {}

    def tensor_on_device(self, tensor: Tensor, step_data: StepData) -> Tensor:
        """Return a tensor of the batch on the device. Later work on the current stream may use it.

        The result shares memory with the batch where it can, but has its own version counter, so a layer that modifies
        one micro-batch in place does not break the backward of another micro-batch.
        """
        if tensor.is_meta:
            return tensor  # a placeholder: this stage does not use the value
        own = tensor.data
        if own.device != self.device:
            return self._copied(own, step_data)
        return own if own.is_cpu else used_here(own)

    def value_on_device(self, value: Any, step_data: StepData) -> Any:
        """Like `tensor_on_device`, for all tensors of a value."""
        return Payload.of(value, partial(self.tensor_on_device, step_data=step_data)).value

    def _copied(self, tensor: Tensor, step_data: StepData) -> Tensor:
        if not is_accelerator(self.device):
            return self._on_host(tensor, step_data)
        arrivals = self._stream(self.device)
        if tensor.is_cpu:
            with on_stream(arrivals):
                copy = tensor.to(self.device, non_blocking=True)
                if tensor.is_pinned():
                    step_data.copies[self] = event_on(arrivals)
        else:
            departures = self._after_caller(tensor, step_data)
            with on_stream(departures), on_stream(arrivals):
                copy = tensor.to(self.device, non_blocking=True)
            tensor.record_stream(departures)
        current_stream(self.device).wait_stream(arrivals)
        return used_here(copy)

    def _on_host(self, tensor: Tensor, step_data: StepData) -> Tensor:
        departures = self._after_caller(tensor, step_data)
        with on_stream(departures):
            copy = host_copy(tensor)
        event_on(departures).synchronize()  # the host computes with the copy
        return copy

    def _after_caller(self, tensor: Tensor, step_data: StepData) -> torch.Stream:
        """Return the stream for copies from the tensor's device, once it waits for what the caller wrote there."""
        stream = self._stream(tensor.device)
        ready = step_data.ready.get(tensor.device)
        stream.wait_event(event_on(current_stream(tensor.device)) if ready is None else ready)
        return stream

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        return self._streams[device]
