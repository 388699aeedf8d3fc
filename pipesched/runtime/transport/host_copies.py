"""Host copies: what a device has still to compute goes to the other hosts once it is there, and no step waits for
it.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.tensors.payload import pytree

__all__ = ["Courier"]

_PATIENCE_S = 2  # for what is on its way when the courier ends


class _Parcel(NamedTuple):
    """A value on its way to the host. given: what it is copied from, kept until it is there."""

    given: Any
    value: Any
    ready: Any
    send: Callable[[Any], None]


class Courier:
    """A thread that waits for a CUDA device, in place of the rank's own. Values leave in the order of ``give``; from a
    CPU, where all is there, at once.

    Dropping the courier ends its thread, as ``end`` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parcels: SimpleQueue[_Parcel | threading.Event | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []  # one, once it is needed
        self.end = finalize(self, _end, self._parcels, self._threads)

    def give(self, value: Any, send: Callable[[Any], None]) -> None:
        """Call ``send`` with a value once its tensors are there: as they are when the current stream comes to here."""
        if self._device.type == "cpu":
            send(value)
            return
        if not self._threads:
            thread = threading.Thread(target=_carry, args=(self._parcels,), name="pipesched courier", daemon=True)
            thread.start()
            self._threads.append(thread)
        host = pytree.tree_map_only(Tensor, _on_host, value)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        self._parcels.put(_Parcel(value, host, ready, send))

    def drain(self) -> None:
        """Wait until all that was given has left."""
        if self._threads and self.end.alive:
            left = threading.Event()
            self._parcels.put(left)
            left.wait()


def _end(parcels: "SimpleQueue[_Parcel | threading.Event | None]", threads: Sequence[threading.Thread]) -> None:
    """End the thread, and wait for it: Python aborts the process if it exits while the thread waits for the device."""
    parcels.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE_S)


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _carry(parcels: "SimpleQueue[_Parcel | threading.Event | None]") -> None:
    """In the thread: until None comes."""
    while (parcel := parcels.get()) is not None:
        if isinstance(parcel, threading.Event):
            parcel.set()
            continue
        with suppress(ExecutionError, RuntimeError):  # of the connection, or the device: the rank's thread meets it too
            parcel.ready.synchronize()
            parcel.send(parcel.value)
        del parcel
