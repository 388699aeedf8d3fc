"""Class names: finds the class of each layer whose name in an nn.Sequential is only a number."""

from collections.abc import Iterable

from torch import nn

__all__ = ["class_names"]


def class_names(model: nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """Return the class name of each layer that is a numbered member of an nn.Sequential, keyed by layer name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {}
    for layer in layers:
        path = layer.partition("#")[0]  # a layer's second call is name#2
        parent, _, number = path.rpartition(".")
        if number.isdecimal() and path in modules and isinstance(modules.get(parent), nn.Sequential):
            found[layer] = type(modules[path]).__name__
    return found
