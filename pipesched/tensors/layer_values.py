"""Layer values: the tensors that layers make in a step, so that code outside the layers is kept from using them."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipesched.tensors.tree_structure import tensors_in

__all__ = ["LayerValues", "Noting"]


class LayerValues:
    """The tensors that torch functions in layers have made. All threads of a process may add tensors."""

    def __init__(self) -> None:
        self._made: dict[int, weakref.ref[Tensor]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        made = self._made.get(id(tensor))
        return made is not None and made() is tensor

    def note(self, tensor: Tensor) -> None:
        """Add a tensor."""
        self._made[id(tensor)] = weakref.ref(tensor)


class Noting(TorchFunctionMode):
    """A function mode that adds the results of all functions to ``values``."""

    def __init__(self, values: LayerValues) -> None:
        super().__init__()
        self._values = values
        #: The ids of the tensors that this mode has added.
        self.own: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._noted(func(*args, **(kwargs or {})))

    def of_results(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function, to add the tensors in its result, which code that is no torch function may have made."""
        return lambda *args: self._noted(call(*args))

    def _noted(self, result: Any) -> Any:
        for tensor in tensors_in(result):
            self._values.note(tensor)
            self.own.add(id(tensor))
        return result
