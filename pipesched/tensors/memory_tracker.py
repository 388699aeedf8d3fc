"""Memory tracker: counts the bytes of live tensors exactly.

On a GPU the counts come from the allocator. On a CPU a dispatch mode sees every operation of a thread, including
operations in backward passes. Each storage that an operation creates is counted until any thread frees it. Memory that
a kernel allocates and frees internally is not counted. Storages that an operation only reads are not counted either.
"""

import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from pipesched.devices.memory import allocated_bytes, begin_peak, peak_bytes
from pipesched.devices.streams import is_accelerator
from pipesched.tensors.payload import pytree
from pipesched.tensors.torch_insides import DispatchMode

__all__ = ["Books", "Ledger", "books_of"]


class Books(Protocol):
    """Counts live bytes, and records their peak since the last ``mark``."""

    @property
    def bytes(self) -> int:
        """The total size of the live storages, in bytes."""

    @property
    def peak(self) -> int:
        """The maximum of ``bytes`` since the last ``mark``."""

    def mark(self) -> None:
        """Reset the peak to the current number of live bytes."""

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context manager that counts allocations of the current thread."""


def books_of(device: torch.device) -> Books:
    """Return a memory counter for a device."""
    return _Allocator(device) if is_accelerator(device) else Ledger()


class Ledger:
    """Counts the bytes of storages that watched threads create, and of tensors passed to ``add``.

    Only storages on devices of one type are counted. Storages on the meta device are counted with the size that they
    would have on another device.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._lock = threading.RLock()  # a storage may be freed while another storage is added
        self._living: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._others: dict[int, weakref.ref[Any]] = {}
        self._bytes = self._peak = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def peak(self) -> int:
        return self._peak

    def mark(self) -> None:
        self._peak = self._bytes

    def watching(self) -> AbstractContextManager[Any]:
        return _Watch(self)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors."""
        for storage in self._storages(tensors):
            self._write(storage)

    def resized(self, storage: Any) -> None:
        """Record the new size of a storage, if the storage is tracked."""
        with self._lock:
            known = self._living.pop(id(storage), None)
            if known is not None:
                self._bytes -= known[1]
                self._living[id(storage)] = known[0], storage.nbytes()
                self._bytes += storage.nbytes()
                self._peak = max(self._peak, self._bytes)

    def leave_out(self, given: Iterable[Any]) -> None:
        """Never count these tensors and storages, even if operations return them later.

        Storages that are already counted stay counted. Objects of other types are ignored.
        """
        parts = [one for one in given if isinstance(one, torch.UntypedStorage)]
        for storage in (*parts, *self._storages([one for one in given if isinstance(one, Tensor)])):
            key = id(storage)
            if key not in self._living and key not in self._others:
                self._others[key] = weakref.ref(storage, lambda _, key=key: self._others.pop(key, None))  # type: ignore[misc]

    def _storages(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Return the storages of the tensors on devices of this type.

        While a storage is alive, torch always returns the same Python object for it.
        """
        held = map(_held_here, tensors)
        mine = [tensor for tensor in held if tensor.layout is torch.strided and tensor.device.type == self._device]
        return [tensor.untyped_storage() for tensor in mine]

    def _write(self, storage: Any) -> None:
        key = id(storage)
        with self._lock:
            if key in self._living or key in self._others or not (size := storage.nbytes()):
                return
            self._living[key] = weakref.ref(storage, lambda _: self._strike(key)), size
            self._bytes += size
            self._peak = max(self._peak, self._bytes)

    def _strike(self, key: int) -> None:
        with self._lock:
            _, size = self._living.pop(key)
            self._bytes -= size


class _Writes:
    """Defines ``__torch_dispatch__`` outside the mode class.

    If a mode class itself defines this method, torch imports torch.compile to wrap it, and this import is slow.
    """

    _ledger: Ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ledger.leave_out(pytree.tree_leaves((args, kwargs)))
        made = func(*args, **(kwargs or {}))
        self._ledger.add(_tensors(made))
        return made


class _Watch(_Writes, DispatchMode):
    """A dispatch mode that adds the results of operations to a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger


class _Allocator:
    """Memory counters of a GPU's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def bytes(self) -> int:
        return allocated_bytes(self._device)

    @property
    def peak(self) -> int:
        return peak_bytes(self._device)

    def mark(self) -> None:
        begin_peak(self._device)

    def watching(self) -> AbstractContextManager[Any]:
        return nullcontext()


def _held_here(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor; return any other tensor unchanged.

    The storage of the DTensor itself has the size of the whole tensor.
    """
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        shard: Tensor = to_local()
    return shard


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
