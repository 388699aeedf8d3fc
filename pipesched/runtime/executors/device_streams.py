"""Device streams: a rank's clock and streams on its device, and copies between devices."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipesched.devices.copies import DeviceCopies
from pipesched.devices.streams import current_stream, event_on, is_accelerator, new_stream, on_stream, used_here
from pipesched.tensors.payload import Payload

__all__ = ["AcceleratorStreams", "CpuStreams", "DeviceMessage", "DeviceStreams", "streams_for"]


class DeviceMessage(NamedTuple):
    """A value in transit, and an event after its computation; None if it was computed on a CPU."""

    value: Any
    ready: torch.Event | None = None


class DeviceStreams(Protocol):
    """The streams and the clock of one rank's device, for the lifetime of the executor."""

    device: torch.device
    #: Whether the device has streams. If so, ``begin``, ``follow``, ``catch_up`` and ``end`` synchronise them.
    has_streams: bool

    def begin(self) -> None:
        """Record the start of a step. Called in the caller's thread."""

    def follow(self) -> None:
        """Make the rank's later work wait for all work that the caller has launched. Called in the caller's thread."""

    def catch_up(self, stamp: Any) -> None:
        """Make the caller's later work wait until the device has reached ``stamp``. Called in the caller's thread."""

    def end(self) -> None:
        """Make the caller's later work wait for all work of the rank. Called in the caller's thread."""

    def entered(self) -> Any:
        """A context for the rank's thread, in which kernels run on the rank's streams."""

    def now(self) -> Any:
        """Return the current time: seconds (float) on a CPU, otherwise an event to read after the step."""

    def reader(self, start_s: float) -> Callable[[Any], float]:
        """Return a function that converts a stamp of the current step to seconds since the host time ``start_s``."""

    def pack(self, value: Any) -> DeviceMessage:
        """Return a Message with a value on this device and the event recorded after its computation."""

    def unpack(self, message: DeviceMessage) -> Any:
        """Copy a received value to this device. Later work on the rank's stream may use the returned value."""


def streams_for(device: torch.device) -> DeviceStreams:
    """Return the streams and the clock for a device."""
    return AcceleratorStreams(device) if is_accelerator(device) else CpuStreams(device)


def _tensors_of(value: Any) -> Sequence[Tensor]:
    return value.tensors if isinstance(value, Payload) else [entry for entry in value if entry is not None]


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Payload):
        return value.map_tensors(change)
    return tuple(entry if entry is None else change(entry) for entry in value)


class CpuStreams:
    """The clock of a rank on a CPU. A CPU has no streams."""

    has_streams = False
    now = staticmethod(time.perf_counter)
    entered = staticmethod(nullcontext)
    pack = staticmethod(DeviceMessage)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = DeviceCopies(device)

    def begin(self) -> None:
        return

    def follow(self) -> None:
        return

    def catch_up(self, stamp: float) -> None:
        return

    def end(self) -> None:
        return

    def reader(self, start_s: float) -> Callable[[float], float]:
        return lambda stamp: stamp - start_s

    def unpack(self, message: DeviceMessage) -> Any:
        return message.value if message.ready is None else _brought(message, self._copies)


class AcceleratorStreams:
    """The clock and the streams of a rank on an accelerator: one for computation, and some for the copies to it."""

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = new_stream(device)
        self._copies = DeviceCopies(device)
        self._idle = new_stream(device)  # no work is ever launched on this stream
        self._caller = current_stream(device)
        self._base = event_on(self._idle, timed=True)
        self._base_s = 0.0

    def begin(self) -> None:
        self._caller = current_stream(self.device)
        self._base = event_on(self._idle, timed=True)  # on another stream, the event would wait for earlier kernels
        self._base_s = time.perf_counter()

    def follow(self) -> None:
        self._caller = current_stream(self.device)
        self._compute.wait_stream(self._caller)

    def catch_up(self, stamp: torch.Event) -> None:
        self._caller.wait_event(stamp)

    def end(self) -> None:
        self._caller.wait_stream(self._compute)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with on_stream(self._compute):
            yield

    def now(self) -> torch.Event:
        return event_on(self._compute, timed=True)

    def reader(self, start_s: float) -> Callable[[torch.Event], float]:
        base = self._base
        base_s = self._base_s - start_s

        def seconds(stamp: torch.Event) -> float:
            base.synchronize()
            stamp.synchronize()
            return base_s + float(base.elapsed_time(stamp)) / 1e3

        return seconds

    def pack(self, value: Any) -> DeviceMessage:
        return DeviceMessage(value, event_on(self._compute))

    def unpack(self, message: DeviceMessage) -> Any:
        if message.ready is not None and any(tensor.device == self.device for tensor in _tensors_of(message.value)):
            self._compute.wait_event(message.ready)
        return _brought(message, self._copies)


def _brought(message: DeviceMessage, copies: DeviceCopies) -> Any:
    """Return a message's value with its tensors on the device of the copies. The current stream may use it."""
    starts: list[Tensor] = []

    def bring(tensor: Tensor) -> Tensor:
        if tensor.device == copies.device and not tensor.is_cpu:
            return used_here(tensor)
        starts.append(copies.start(tensor, message.ready))
        return starts[-1]

    value = _map(message.value, bring)
    if starts:
        copies.wait()
    return value
