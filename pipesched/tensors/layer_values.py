"""Layer values: the tensors that layers make in a step, so that code outside the layers is kept from using them."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from pipesched.tensors.tensor_table import TensorTable
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["LayerValues", "Noting"]

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
