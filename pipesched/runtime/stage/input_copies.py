"""Input copies: bring the tensors of a batch to the device of a stage."""

from typing import Any

import torch
from torch import Tensor

from pipesched.devices.copies import DeviceCopies
from pipesched.devices.streams import event_on
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.payload import Payload

__all__ = ["InputCopies"]


class InputCopies:
    """Copies tensors of a batch from the host or from other devices to one device. Not thread-safe.

    Args:
        device: the device to which the tensors are copied.

    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: The step whose batch is copied.
        self.step_data = StepData(0, 0, [])
        self._copies = DeviceCopies(device)

    def tensor_on_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the batch on the device. Later work on the current stream may use it.

        The result shares memory with the batch where it can, but has its own version counter, so a layer that modifies
        one micro-batch in place does not break the backward of another micro-batch.
        """
        if tensor.is_meta:
            return tensor  # a placeholder: this stage does not use the value
        own = tensor.data  # its memory stays: the caller's streams wait for a step before its batch can be freed
        return own if own.device == self.device else self._copied(own)

    def value_on_device(self, value: Any) -> Any:
        """Like `tensor_on_device`, for all tensors of a value."""
        return Payload.of(value, self.tensor_on_device).value

    def _copied(self, tensor: Tensor) -> Tensor:
        copy = self._copies.start(tensor, self.step_data.ready.get(tensor.device))
        if tensor.is_cpu and tensor.is_pinned():
            self.step_data.copies[self] = event_on(self._copies.arrivals)
        self._copies.wait()
        return copy
