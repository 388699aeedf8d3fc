"""Memory tracker: the memory of tensors that lives, to the byte: of one thread on the host, or of a GPU by its
allocator.

Every operation that torch runs in the thread is seen, those of backwards too, and so is every storage that comes out of
one; it is in the books until it is freed, by whichever thread. What a kernel allocates and frees within itself is not
seen on the host. Storages that only go into operations are others'.
"""

import threading
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

# Public modes see calls of torch's functions, but not the operations of backwards. Torch's guide to extending it names
# this one, and there is no public module for it.
from torch.utils._python_dispatch import TorchDispatchMode

from pipesched.tensors.payload import pytree

__all__ = ["Books", "Ledger", "books_of"]


class Books(Protocol):
    """Bytes that live, and the most that did since ``mark``."""

    @property
    def bytes(self) -> int:
        """What lives."""

    @property
    def peak(self) -> int:
        """The most that lived at once since the last mark."""

    def mark(self) -> None:
        """The peak is what lives now."""

    def watching(self) -> AbstractContextManager[Any]:
        """A context in which what this thread allocates is written down."""


def books_of(device: torch.device) -> Books:
    """The books of a device."""
    return _Allocator(device) if device.type == "cuda" else Ledger()


class Ledger:
    """The storages that operations of the watched threads have made, and those that were added; of one sort of device.

    Those of the meta device, which have no contents, count as what they stand for.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._lock = threading.RLock()  # a storage may be freed while another one is written down
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
        """Write down what was made before."""
        for storage in self._storages(tensors):
            self._write(storage)

    def leave_out(self, given: Iterable[Any]) -> None:
        """These tensors and storages are others', whatever is made of them in place; so are views of a storage's part,
        which are storages of their own.
        """
        parts = [one for one in given if isinstance(one, torch.UntypedStorage)]
        for storage in (*parts, *self._storages([one for one in given if isinstance(one, Tensor)])):
            key = id(storage)
            if key not in self._living and key not in self._others:
                self._others[key] = weakref.ref(storage, lambda _, key=key: self._others.pop(key, None))  # type: ignore[misc]

    def _storages(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Their storages. One that is known by its object stays the same object as long as it lives."""
        mine = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.device.type == self._device]
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
    """Of a class of its own: a mode's own method would be wrapped by torch.compile, which takes a second to import."""

    _ledger: Ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ledger.leave_out(pytree.tree_leaves((args, kwargs)))
        made = func(*args, **(kwargs or {}))
        self._ledger.add(_tensors(made))
        return made


class _Watch(_Writes, TorchDispatchMode):
    """Writes down what operations make."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger


class _Allocator:
    """A GPU's own books."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def mark(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def watching(self) -> AbstractContextManager[Any]:
        return nullcontext()


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
