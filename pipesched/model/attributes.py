"""Attributes: the values of module attributes and buffers that a forward sets, so that they can be set again."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["OF_ALL_MODULES", "Attributes", "BufferValue", "attribute", "set_attributes"]

#: The names of the attributes that every module has.
OF_ALL_MODULES = vars(nn.Module()).keys()

#: (module, name of an attribute or buffer) -> its value; see ``attribute``
Attributes = Mapping[tuple[nn.Module, str], Any]


class BufferValue(NamedTuple):
    """The value of a buffer, and whether the buffer belongs to the module's state dict."""

    tensor: Tensor | None
    persistent: bool


def attribute(module: nn.Module, name: str) -> Any:
    """Return the value of an attribute, or a BufferValue. Raises AttributeError if there is no such attribute."""
    if name in module._buffers:
        return BufferValue(module._buffers[name], name not in module._non_persistent_buffers_set)
    return getattr(module, name)


def set_attributes(values: Attributes) -> None:
    """Set attributes of modules, and register buffers."""
    for (module, name), value in values.items():
        if isinstance(value, BufferValue):
            module.register_buffer(name, value.tensor, persistent=value.persistent)
        else:
            setattr(module, name, value)
