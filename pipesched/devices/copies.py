"""Copies: bring tensors to one device from other devices and from the host, while the devices compute."""

import torch
from torch import Tensor

from pipesched.devices.memory import host_copy
from pipesched.devices.streams import current_stream, event_on, is_accelerator, new_stream, on_stream, used_here

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """Copies tensors to one device, on streams of their own. Not thread-safe.

    There is one stream for each device from which tensors come, and one for the copies that arrive. So a copy waits for
    no computation but that of its tensor, and for no copy to another device.

    Args:
        device: the device to which tensors are copied.

    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[torch.device, torch.Stream] = {}
        #: For each stream that copies to the host, the event of its last copy; for None, that of values on the host.
        self._for_host: dict[torch.Stream | None, torch.Event] = {}

    @property
    def arrivals(self) -> torch.Stream:
        """The stream on which copies arrive."""
        return self._stream(self.device)

    def start(self, tensor: Tensor, ready: torch.Event | None = None) -> Tensor:
        """Start copying a tensor of another device. The copy may be used after `wait`.

        Args:
            tensor: the tensor.
            ready: an event after which the tensor has its values. Default: the end of the work on the current stream of
                its device; a tensor on the host has its values.

        """
        if tensor.is_cpu:
            return self._from_host(tensor, ready)
        departures = self._stream(tensor.device)
        departures.wait_event(event_on(current_stream(tensor.device)) if ready is None else ready)
        if not is_accelerator(self.device):
            with on_stream(departures):
                copy = host_copy(tensor)
            self._for_host[departures] = event_on(departures)
            return copy
        with on_stream(departures), on_stream(self.arrivals):  # torch makes each of them wait for the other
            copy = tensor.to(self.device, non_blocking=True)
        tensor.record_stream(departures)
        return used_here(copy)

    def _from_host(self, tensor: Tensor, ready: torch.Event | None) -> Tensor:
        if not is_accelerator(self.device):
            if ready is not None:  # a layer may have copied the tensor to the host without waiting
                self._for_host[None] = ready
            return tensor
        if ready is not None:
            self.arrivals.wait_event(ready)
        with on_stream(self.arrivals):
            copy = tensor.to(self.device, non_blocking=True)
        return used_here(copy)

    def wait(self) -> None:
        """Make later work on the current stream wait for the copies. On the host, wait for them."""
        if is_accelerator(self.device):
            current_stream(self.device).wait_stream(self.arrivals)
        while self._for_host:
            self._for_host.popitem()[1].synchronize()

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        return self._streams[device]
