"""Streams: the streams and events of an accelerator. A CPU has none."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch
from torch import Tensor

__all__ = [
    "current_stream",
    "event_on",
    "events_of_caller",
    "is_accelerator",
    "new_stream",
    "on_device",
    "on_stream",
    "on_streams",
    "streams_here",
    "synchronize",
    "used_here",
]

_WITHOUT_STREAMS = ("cpu", "meta")


def is_accelerator(device: torch.device) -> bool:
    """Return whether operations on the device run asynchronously, on streams."""
    return device.type not in _WITHOUT_STREAMS


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream on which this thread launches operations of an accelerator."""
    return torch.accelerator.current_stream(device)


def streams_here(devices: Iterable[torch.device]) -> list[torch.Stream]:
    """Return this thread's current stream of each of the devices that is an accelerator."""
    return [current_stream(device) for device in {*devices} if is_accelerator(device)]


@contextmanager
def on_streams(streams: Sequence[torch.Stream]) -> Iterator[None]:
    """A context in which this thread launches operations on these streams, at most one for each device."""
    if not streams:
        yield
        return
    index = torch.accelerator.current_device_index()
    with ExitStack() as stack:
        for stream in streams:
            stack.enter_context(on_stream(stream))
        torch.accelerator.set_device_index(index)
        yield


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of an accelerator."""
    return torch.Stream(device=device)


def event_on(stream: torch.Stream, *, timed: bool = False) -> torch.Event:
    """Return an event that marks the end of the work launched so far on a stream.

    Args:
        stream: the stream.
        timed: whether the event records the time. Default: False.

    """
    event = torch.Event(device=stream.device, enable_timing=timed)
    event.record(stream)
    return event


def events_of_caller(tensors: Iterable[Tensor]) -> dict[torch.device, torch.Event]:
    """Return, for each accelerator that holds some of the tensors, an event on this thread's current stream."""
    return {stream.device: event_on(stream) for stream in streams_here(tensor.device for tensor in tensors)}


def synchronize(device: torch.device) -> None:
    """Wait until all work on an accelerator is done, on all streams. Does nothing for a CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def used_here(tensor: Tensor) -> Tensor:
    """Mark a tensor as used by the current stream, so that its memory is not reused too early by another stream."""
    if not (tensor.is_cpu or tensor.is_meta):
        tensor.record_stream(current_stream(tensor.device))
    return tensor


class on_device:  # noqa: N801  # used as a context, like torch.accelerator.device_index
    """A context in which an accelerator is the current device of this thread.

    Args:
        device: the accelerator.

    """

    __slots__ = ("_before", "_device")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._device)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        torch.accelerator.set_device_index(self._before)


class on_stream:  # noqa: N801  # used as a context, like torch.cuda.stream
    """A context in which this thread launches operations on a stream. The stream's device is the current device.

    Unlike ``with stream:``, several threads may be on one stream at the same time.

    Args:
        stream: the stream.

    """

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._device = on_device(stream.device)
        self._before = stream

    def __enter__(self) -> None:
        self._device.__enter__()
        self._before = current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        torch.accelerator.set_stream(self._before)
        self._device.__exit__(kind, error, at)
