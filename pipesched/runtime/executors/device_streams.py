"""Device streams: a rank's clock and streams on its device, and copies between devices."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipesched.devices.memory import host_copy
from pipesched.devices.streams import current_stream, event_on, is_accelerator, new_stream, on_stream, used_here
from pipesched.tensors.payload import Payload

__all__ = ["AcceleratorStreams", "CpuStreams", "DeviceMessage", "DeviceStreams", "streams_for"]


class DeviceMessage(NamedTuple):
    """A value in transit, the event recorded after its computation, and the sending device's stream for copies."""

    value: Any
    ready: torch.Event | None = None
    stream: torch.Stream | None = None


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
        stream = message.stream
        if stream is None or message.ready is None:
            return message.value
        with on_stream(stream):
            stream.wait_event(message.ready)
            value = _map(message.value, lambda tensor: tensor if tensor.is_cpu else host_copy(tensor))
        event_on(stream).synchronize()  # the host computes with the copies
        return value


class AcceleratorStreams:
    """The clock and the streams of a rank on an accelerator: a stream for computation, and one for each direction.

    Each direction has its own stream for copies, because outgoing copies wait for computation, and incoming copies must
    not wait behind outgoing copies.
    """

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = new_stream(device)
        self._outward = new_stream(device)
        self._inward = new_stream(device)
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
        return DeviceMessage(value, event_on(self._compute), self._outward)

    def unpack(self, message: DeviceMessage) -> Any:
        sources = {tensor.device for tensor in _tensors_of(message.value)}
        if message.ready is not None:
            for source in sources:
                self._reader(source, message).wait_event(message.ready)
        value = _map(message.value, lambda tensor: self._bring(tensor, message))
        if sources - {self.device}:
            self._compute.wait_stream(self._inward)
        return value

    def _reader(self, source: torch.device, message: DeviceMessage) -> torch.Stream:
        """Return the stream that reads the message's tensors of a device."""
        if source == self.device:
            return self._compute
        return self._inward if message.stream is None or source.type == "cpu" else message.stream

    def _bring(self, tensor: Tensor, message: DeviceMessage) -> Tensor:
        if tensor.device == self.device:
            return used_here(tensor)
        # A copy between devices is launched on the current stream of the source device, and synchronises with the
        # current stream of the target device.
        reader = self._reader(tensor.device, message)
        with on_stream(reader), on_stream(self._inward):
            moved = tensor.to(self.device, non_blocking=True)
        if not tensor.is_cpu:
            tensor.record_stream(reader)
        return used_here(moved)
