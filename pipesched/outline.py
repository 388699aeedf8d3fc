"""Outline: a model's own code between its layers, run without contents of weights: stand-ins for what layers give.

So code that computes a loss from labels can be asked over which of them its mean is, before any weight is made.
"""

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipesched.containers import Shells, find_layers
from pipesched.contents import call_beside, stand_in
from pipesched.payload import pytree
from pipesched.untouched import unchanged

__all__ = ["Outline"]


class Outline(TorchFunctionMode):
    """Called as the model. The rows of what a layer gives are all alike, so that a batch's parts are its rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        layers = find_layers(model)
        self._root = Shells(model, layers, self._layer, layers).model
        self._inside = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, of the form and with the rows that it has."""
        with self:
            return self._root(*args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: stand_in(tensor, weight=True), (args, kwargs or {}))
        return func(*args, **kwargs)

    def _layer(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return layer(*args, **kwargs)
        self._inside = True
        try:
            before = unchanged((args, kwargs))
            result = call_beside(layer, args, kwargs, lambda: before)
            return pytree.tree_map_only(Tensor, stand_in, result)
        finally:
            self._inside = False
