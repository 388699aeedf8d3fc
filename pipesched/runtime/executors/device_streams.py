"""Device streams: what a rank's device does beside computing: its clock, and the copies between devices."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pipesched.tensors.payload import Payload

__all__ = ["CpuStreams", "CudaStreams", "DeviceStreams", "Message", "streams_for"]


class Message(NamedTuple):
    """A value on its way, with the moment on its device at which it is complete, and the stream to copy it on."""

    value: Any
    ready: torch.cuda.Event | None = None
    stream: torch.cuda.Stream | None = None


class DeviceStreams(Protocol):
    """One rank's device, for the length of the executor's life."""

    #: Whether work is launched in streams, which ``begin``, ``follow``, ``catch_up`` and ``end`` put in order.
    has_streams: bool

    def begin(self) -> None:
        """In the caller's thread: a step begins."""

    def follow(self) -> None:
        """In the caller's thread: what the rank computes from now on comes after what the caller has launched."""

    def catch_up(self, stamp: Any) -> None:
        """In the caller's thread: what the caller launches from now on comes after a stamp."""

    def end(self) -> None:
        """In the caller's thread: what the caller launches from now on comes after the step."""

    def entered(self) -> Any:
        """A context for the rank's thread."""

    def now(self) -> Any:
        """A stamp."""

    def reader(self, start_s: float) -> Callable[[Any], float]:
        """A function that reads a stamp of the present step as seconds since this host time."""

    def pack(self, value: Any) -> Message:
        """A value of this device, to be sent."""

    def unpack(self, message: Message) -> Any:
        """A received value, on this device, safe to be used by what is launched from now on."""


def streams_for(device: torch.device) -> DeviceStreams:
    """The lane for a device."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams(device)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Payload):
        return value.map_tensors(change)
    return tuple(entry if entry is None else change(entry) for entry in value)


class CpuStreams:
    """A CPU rank: the host's clock, and nothing to wait for."""

    has_streams = False
    now = staticmethod(time.perf_counter)
    entered = staticmethod(nullcontext)
    pack = staticmethod(Message)

    def __init__(self, device: torch.device) -> None:
        self._device = device

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

    def unpack(self, message: Message) -> Any:
        if message.ready is None:
            return message.value
        message.ready.synchronize()  # from a GPU: the host itself must wait
        return _map(message.value, lambda tensor: tensor.to(self._device))


class CudaStreams:
    """A CUDA rank: a stream to compute on, one for copies to other devices and one for copies from them, and events.

    A stream of its own for each direction: what goes out waits to be computed, and nothing that comes in waits behind.
    """

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device)
        self._outward = torch.cuda.Stream(device)
        self._inward = torch.cuda.Stream(device)
        self._idle = torch.cuda.Stream(device)  # nothing is ever launched in it
        self._caller = torch.cuda.current_stream(device)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base_s = 0.0

    def begin(self) -> None:
        self._caller = torch.cuda.current_stream(self._device)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(self._idle)  # in any other one it would wait for what was launched before
        self._base_s = time.perf_counter()

    def follow(self) -> None:
        self._caller = caller = torch.cuda.current_stream(self._device)
        self._compute.wait_stream(caller)
        self._inward.wait_stream(caller)  # what was received before may have been given to the caller, who read it
        default = torch.cuda.default_stream(self._device)
        if caller != default:
            default.wait_stream(caller)  # in it the ranks of other devices read the batch's tensors on this one

    def catch_up(self, stamp: torch.cuda.Event) -> None:
        self._caller.wait_event(stamp)

    def end(self) -> None:
        self._caller.wait_stream(self._compute)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._compute):
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

    def pack(self, value: Any) -> Message:
        ready = torch.cuda.Event()
        ready.record(self._compute)
        return Message(value, ready, self._outward)

    def unpack(self, message: Message) -> Any:
        value = _map(message.value, lambda tensor: self._bring(tensor, message))
        self._compute.wait_stream(self._inward)
        if message.ready is not None:
            self._compute.wait_event(message.ready)
        return value

    def _bring(self, tensor: Tensor, message: Message) -> Tensor:
        if tensor.device == self._device:
            tensor.record_stream(self._compute)
            return tensor
        # A copy between GPUs is launched on the current stream of the sending one, and ends on that of this one.
        source = message.stream or self._inward
        with torch.cuda.stream(source), torch.cuda.stream(self._inward):
            if message.ready is not None:
                source.wait_event(message.ready)
            moved = tensor.to(self._device, non_blocking=True)
        if tensor.is_cuda:
            tensor.record_stream(source)
        moved.record_stream(self._compute)
        return moved
