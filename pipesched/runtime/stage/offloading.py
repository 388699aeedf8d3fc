"""Offloading: moves the saved activations of some layers to host memory, and back to the device for the backward.

Saved-tensor hooks see all tensors that autograd saves during a stage's forward. OFFLOAD copies the storages that
only offloaded layers have saved. FREE releases the device memory after the copy. FETCH allocates device memory and
copies the data back. On an accelerator the copies use pinned memory and separate streams, so they overlap with
computation; on a CPU they are synchronous. Memory that is also used elsewhere is not moved. Such memory includes
parameters, buffers, outputs of the stage, and tensors that other layers save.
"""

import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipesched.devices.memory import host_memory
from pipesched.devices.streams import current_stream, event_on, is_accelerator, new_stream, on_stream, synchronize
from pipesched.errors import ExecutionError
from pipesched.tensors.payload import memory_of
from pipesched.tensors.torch_insides import base_of

__all__ = ["Offloads", "addresses", "host_bytes_per_s"]

_PLAIN = (Tensor, nn.Parameter)


def host_bytes_per_s(device: torch.device) -> float:
    """Measure the bandwidth of copies between a device and the host, with copies in both directions at the same time.

    Returns:
        Bytes per second in each direction; for a CPU, the bandwidth of a memory copy.

    """
    copied = _both_ways_s if is_accelerator(device) else _one_way_s
    copied(device)  # warm up: allocate the memory
    return _MEASURED_BYTES / median(copied(device) for _ in range(5))


_MEASURED_BYTES = 1 << 26  # larger than the caches


def _one_way_s(device: torch.device) -> float:
    """Return the duration of one synchronous copy, in seconds."""
    given, made = (torch.zeros(_MEASURED_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    begin = time.perf_counter()
    made.copy_(given)
    return time.perf_counter() - begin


def _both_ways_s(device: torch.device) -> float:
    """Return the duration of the slower of two concurrent copies, one in each direction, in seconds."""
    pairs = []
    for outward in (True, False):
        there = torch.empty(_MEASURED_BYTES, dtype=torch.uint8, device=device)
        here = host_memory([_MEASURED_BYTES], torch.uint8, device)
        pairs.append((here, there) if outward else (there, here))
    synchronize(device)
    ends = []
    for target, source in pairs:
        stream = new_stream(device)
        begin = event_on(stream, timed=True)
        with on_stream(stream):
            target.copy_(source, non_blocking=True)
        ends.append((begin, event_on(stream, timed=True)))
    synchronize(device)
    return float(max(begin.elapsed_time(end) for begin, end in ends) / 1e3)


class _SharedStorage:
    """A storage that several saved tensors can share. The storage is on the device, on the host, or in transit."""

    __slots__ = ("__weakref__", "device", "host", "ready")

    def __init__(self, memory: Tensor) -> None:
        self.device: Tensor | None = memory  # the storage as bytes
        self.host: Tensor | None = None
        self.ready: torch.Event | None = None


class _SavedTensor:
    """A saved tensor. Once it is offloaded, only its layout and the `_SharedStorage` that contains it are kept."""

    __slots__ = ("__weakref__", "form", "goes", "memory", "piece", "tensor", "version")

    def __init__(self, tensor: Tensor, goes: bool) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.goes = goes
        self.memory = _address(tensor)
        self.form: Any = None
        self.piece: _SharedStorage | None = None

    def leave(self, piece: _SharedStorage) -> None:
        """Release the tensor; keep its layout, and the ``piece`` of memory with its data."""
        tensor = self.unchanged()
        self.form = tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()
        self.tensor = None
        self.piece = piece

    def unchanged(self) -> Tensor:
        """Return the saved tensor. Raises ExecutionError if it was modified after it was saved."""
        assert self.tensor is not None
        if self.tensor._version != self.version:
            raise ExecutionError(
                f"tensors that autograd has saved must stay unchanged until their backward; a tensor of shape "
                f"{list(self.tensor.shape)} was modified in place after it was saved; remove the in-place operation"
            )
        return self.tensor

    def back(self) -> Tensor:
        """Return the saved tensor for the backward. Raises ExecutionError if it was modified, or was not fetched."""
        if self.piece is None:
            return self.unchanged()
        if self.piece.device is None:
            raise ExecutionError(
                "an offloaded tensor must be fetched before its backward; this tensor was not fetched; check "
                "the order with pipesched.validate(program)"
            )
        dtype, *form = self.form
        with torch.no_grad():
            made = torch.empty(0, dtype=dtype, device=self.piece.device.device)
            return made.set_(self.piece.device.untyped_storage(), *form)


class Offloads:
    """The offloaded tensors of one stage, kept separately for each micro-batch.

    Args:
        device: the device of the stage.

    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: The streams for copies to the host and back; None on a CPU.
        self._streams = (new_stream(device), new_stream(device)) if is_accelerator(device) else None
        self._held: dict[int, list[weakref.ref[_SavedTensor]]] = {}
        self._pieces: dict[int, list[_SharedStorage]] = {}
        self._going = False

    def clear(self) -> None:
        """Discard the state of all micro-batches, after waiting for copies that a failed step left running."""
        for piece in chain.from_iterable(self._pieces.values()):
            if piece.ready is not None:
                piece.ready.synchronize()
        self._held.clear()
        self._pieces.clear()

    @contextmanager
    def saving(self, microbatch: int) -> Iterator[None]:
        """A context that records the tensors that a micro-batch's forward saves."""
        held = self._held[microbatch] = []

        def pack(tensor: Tensor) -> _SavedTensor:
            one = _SavedTensor(tensor if tensor.is_leaf else tensor.detach(), self._going and not _is_weight(tensor))
            held.append(weakref.ref(one))
            return one

        with saved_tensors_hooks(pack, _SavedTensor.back):
            yield

    @contextmanager
    def going(self) -> Iterator[None]:
        """A context for running a layer whose saved tensors will be offloaded."""
        before = self._going
        self._going = True
        try:
            yield
        finally:
            self._going = before

    def offload(self, microbatch: int, staying: Collection[int]) -> None:
        """OFFLOAD: start copying a micro-batch's activations to the host.

        ``staying`` contains the addresses of memory that must stay on the device.
        """
        pieces = self._pieces[microbatch] = []
        for tensors in self._movable(microbatch, staying):
            piece = _SharedStorage(_bytes_of(tensors[0].unchanged()))
            for held in tensors:
                held.leave(piece)
            self._to_host(piece)
            pieces.append(piece)

    def free(self, microbatch: int) -> None:
        for piece in self._pieces.get(microbatch, ()):
            self._wait(piece)
            piece.device = None

    def fetch(self, microbatch: int) -> None:
        for piece in self._pieces.get(microbatch, ()):
            self._to_device(piece)

    def arrived(self, microbatch: int) -> None:
        """Prepare a micro-batch's backward: make later work on the current stream wait for the fetched tensors."""
        self._held.pop(microbatch, None)
        for piece in self._pieces.pop(microbatch, ()):
            self._wait(piece)
            piece.host = None

    def _movable(self, microbatch: int, staying: Collection[int]) -> Iterator[list[_SavedTensor]]:
        """Yield lists of saved tensors that can be moved. The tensors in a list share their memory."""
        groups: dict[int, list[_SavedTensor]] = {}
        for held in _alive(self._held.get(microbatch, ())):
            groups.setdefault(held.memory, []).append(held)
        for memory, tensors in groups.items():
            if memory and memory not in staying and all(held.goes and _moves(held, self._device) for held in tensors):
                forms = {(t.storage_offset(), t.size(), t.stride()): t.nbytes for t in (h.unchanged() for h in tensors)}
                if (
                    sum(forms.values()) >= tensors[0].unchanged().untyped_storage().nbytes()
                ):  # otherwise part of the memory is in use elsewhere
                    yield tensors

    def _to_host(self, piece: _SharedStorage) -> None:
        assert piece.device is not None
        piece.host = host_memory([len(piece.device)], torch.uint8, self._device)
        self._copy(piece, piece.host, piece.device, outward=True)

    def _to_device(self, piece: _SharedStorage) -> None:
        assert piece.host is not None
        piece.device = torch.empty(len(piece.host), dtype=torch.uint8, device=self._device)
        self._copy(piece, piece.device, piece.host, outward=False)

    def _copy(self, piece: _SharedStorage, target: Tensor, source: Tensor, *, outward: bool) -> None:
        if self._streams is None:
            target.copy_(source)
            return
        stream = self._streams[not outward]
        # the current stream wrote the source, or last used the target's memory
        stream.wait_stream(current_stream(self._device))
        with on_stream(stream):
            target.copy_(source, non_blocking=True)
        piece.ready = event_on(stream)

    def _wait(self, piece: _SharedStorage) -> None:
        """Make later computation on the current stream wait for the piece's last copy."""
        if piece.ready is not None:
            current_stream(self._device).wait_event(piece.ready)


def addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    """Return the addresses of the tensors' storages, except for Tensor subclasses and tensors without a storage."""
    return frozenset(map(_address, tensors)) - {0}


def _address(tensor: Tensor) -> int:
    return memory_of(tensor) if type(tensor) in _PLAIN else 0


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or another trainable leaf, or a view of such a tensor.

    Parameters are not moved, because sharding libraries change their memory.
    """
    base = base_of(tensor)
    base = tensor if base is None else base
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


def _alive(references: Iterable["weakref.ref[Any]"]) -> list[Any]:
    """Return the objects that these weak references still point to."""
    return [one for reference in references if (one := reference()) is not None]


def _moves(held: _SavedTensor, device: torch.device) -> bool:
    """Return whether a saved tensor is on the device and can be restored from its bytes and its layout."""
    tensor = held.tensor
    if tensor is None or type(tensor) not in _PLAIN or tensor.device != device or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes."""
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
