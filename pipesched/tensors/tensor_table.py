"""Tensor table: a dict whose keys are tensors, compared by identity, which does not keep the tensors alive."""

import weakref
from typing import Generic, TypeVar

from torch import Tensor

__all__ = ["TensorTable"]

_V = TypeVar("_V")


class TensorTable(Generic[_V]):
    """Maps tensors to values. Several threads may use a table at the same time."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], _V]] = {}

    def __setitem__(self, tensor: Tensor, value: _V) -> None:
        self._found[id(tensor)] = weakref.ref(tensor), value

    def __contains__(self, tensor: Tensor) -> bool:
        known = self._found.get(id(tensor))
        return known is not None and known[0]() is tensor  # else the id belonged to a tensor that is gone

    def get(self, tensor: Tensor) -> _V | None:
        """Return the value of a tensor; None if the tensor is not in the table."""
        known = self._found.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None
