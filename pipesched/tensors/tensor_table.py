"""Tensor table: a dict whose keys are tensors, compared by identity, which does not keep the tensors alive.

`Noting` fills a table with the tensors that layers make, so that code outside the layers is kept from using them.
"""

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipesched.tensors.tree_structure import tensors_in

__all__ = ["LayerValues", "Noting", "TensorTable"]

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


#: The tensors that torch functions in layers have made, with True as their value.
LayerValues = TensorTable[bool]


class Noting(TorchFunctionMode):
    """A function mode that adds the results of all functions to ``values``."""

    def __init__(self, values: LayerValues) -> None:
        super().__init__()
        self._values = values
        #: The tensors that this mode has added.
        self.own = LayerValues()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._noted(func(*args, **(kwargs or {})))

    def of_results(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function, to add the tensors in its result, which code that is no torch function may have made."""
        return lambda *args: self._noted(call(*args))

    def _noted(self, result: Any) -> Any:
        for tensor in tensors_in(result):
            self._values[tensor] = self.own[tensor] = True
        return result
