"""Host copies: values of an accelerator are copied to the host and sent to other ranks, while the step continues."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from pipesched.devices.memory import host_copy
from pipesched.devices.streams import current_stream, event_on
from pipesched.errors import ExecutionError
from pipesched.tensors.payload import pytree

__all__ = ["Courier"]

_PATIENCE_S = 2  # time to send values that are in transit when the courier ends


class _Parcel(NamedTuple):
    """A value that is being copied to the host. The copy is done after the event ``ready``."""

    value: Any
    ready: Any
    send: Callable[[Any], None]


class Courier:
    """Sends values from an accelerator in a separate thread, so that the rank's thread does not wait for the device.

    Values are sent in the order of the calls to ``give``. On a CPU there is no thread: ``give`` sends the value
    directly. The thread ends when the courier is garbage-collected, or when ``end`` is called.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parcels: SimpleQueue[_Parcel | threading.Event | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []  # at most one thread, started by the first call to ``give``
        self.end = finalize(self, _end, self._parcels, self._threads)

    def give(self, value: Any, send: Callable[[Any], None]) -> None:
        """Call ``send`` with a host copy of a value, once the work posted so far on the current stream is done."""
        if self._device.type == "cpu":
            send(value)
            return
        if not self._threads:
            thread = threading.Thread(target=_carry, args=(self._parcels,), name="pipesched courier", daemon=True)
            thread.start()
            self._threads.append(thread)
        host = pytree.tree_map_only(Tensor, _on_host, value)
        ready = event_on(current_stream(self._device))
        self._parcels.put(_Parcel(host, ready, send))

    def drain(self) -> None:
        """Wait until all values have been sent."""
        if self._threads and self.end.alive:
            left = threading.Event()
            self._parcels.put(left)
            left.wait()


def _end(parcels: "SimpleQueue[_Parcel | threading.Event | None]", threads: Sequence[threading.Thread]) -> None:
    """Stop and join the thread, because a process aborts if it exits while one of its threads waits for the device."""
    parcels.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE_S)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cpu else host_copy(tensor)


def _carry(parcels: "SimpleQueue[_Parcel | threading.Event | None]") -> None:
    """The main loop of the thread: send values until None arrives."""
    while (parcel := parcels.get()) is not None:
        if isinstance(parcel, threading.Event):
            parcel.set()
            continue
        with suppress(ExecutionError, RuntimeError):  # a lost connection or device; the rank's thread also fails
            parcel.ready.synchronize()
            parcel.send(parcel.value)
        del parcel
