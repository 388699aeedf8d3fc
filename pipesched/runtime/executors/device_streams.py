"""Device streams: a rank's clock and streams on its device, and copies between devices."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipesched.tensors.payload import Payload

__all__ = ["CpuStreams", "CudaStreams", "DeviceMessage", "DeviceStreams", "streams_for"]


class DeviceMessage(NamedTuple):
    """A value in transit, the event recorded after its computation, and the sending device's stream for copies."""

    value: Any
    ready: torch.cuda.Event | None = None
    stream: torch.cuda.Stream | None = None


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
        """Make the caller's later work wait for the end of the step. Called in the caller's thread."""

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
    return CudaStreams(device) if device.type == "cuda" else CpuStreams(device)


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
        if message.ready is None:
            return message.value
        message.ready.synchronize()  # the value comes from a GPU, so the host must wait
        return _map(message.value, lambda tensor: tensor.to(self.device))


class CudaStreams:
    """The clock and the streams of a CUDA rank: one stream for computation, and one for copies in each direction.

    Each direction has its own stream, because outgoing copies wait for computation, and incoming copies must not wait
    behind outgoing copies.
    """

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.Stream(device)
        self._outward = torch.cuda.Stream(device)
        self._inward = torch.cuda.Stream(device)
        self._idle = torch.cuda.Stream(device)  # no work is ever launched on this stream
        self._caller = torch.cuda.current_stream(device)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base_s = 0.0

    def begin(self) -> None:
        self._caller = torch.cuda.current_stream(self.device)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(self._idle)  # on another stream, the event would wait for earlier kernels
        self._base_s = time.perf_counter()

    def follow(self) -> None:
        self._caller = caller = torch.cuda.current_stream(self.device)
        self._compute.wait_stream(caller)
        self._inward.wait_stream(caller)  # the caller may still be reading memory received earlier
        default = torch.cuda.default_stream(self.device)
        if caller != default:
            default.wait_stream(caller)  # ranks on other devices read the batch on this stream

    def catch_up(self, stamp: torch.cuda.Event) -> None:
        self._caller.wait_event(stamp)

    def end(self) -> None:
        self._caller.wait_stream(self._compute)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._compute):
            yield

    def now(self) -> torch.cuda.Event:
        stamp = torch.cuda.Event(enable_timing=True)
        stamp.record(self._compute)
        return stamp

    def reader(self, start_s: float) -> Callable[[torch.cuda.Event], float]:
        base = self._base
        base_s = self._base_s - start_s

        def seconds(stamp: torch.cuda.Event) -> float:
            base.synchronize()
            stamp.synchronize()
            return base_s + float(base.elapsed_time(stamp)) / 1e3

        return seconds

    def pack(self, value: Any) -> DeviceMessage:
        ready = torch.cuda.Event()
        ready.record(self._compute)
        return DeviceMessage(value, ready, self._outward)

    def unpack(self, message: DeviceMessage) -> Any:
        value = _map(message.value, lambda tensor: self._bring(tensor, message))
        self._compute.wait_stream(self._inward)
        if message.ready is not None:
            self._compute.wait_event(message.ready)
        return value

    def _bring(self, tensor: Tensor, message: DeviceMessage) -> Tensor:
        if tensor.device == self.device:
            tensor.record_stream(self._compute)
            return tensor
        # A copy between GPUs is launched on the current stream of the source device, and synchronises with the current
        # stream of the target device.
        source = message.stream or self._inward
        with torch.cuda.stream(source), torch.cuda.stream(self._inward):
            if message.ready is not None:
                source.wait_event(message.ready)
            moved = tensor.to(self.device, non_blocking=True)
        if tensor.is_cuda:
            tensor.record_stream(source)
        moved.record_stream(self._compute)
        return moved
