"""Tensor attributes: tensors that stand in for a parameter or a buffer have the Python attributes of the original.

Models set such attributes on their weights, for example a muP multiplier, a learning rate scale or a gradient buffer.
"""

from typing import Any

from torch import Tensor, nn

__all__ = ["is_plain", "with_attributes_of", "with_copied_attributes_of"]


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor or a parameter of no subclass. A subclass may keep contents in attributes."""
    return type(value) in (Tensor, nn.Parameter)


def with_attributes_of(own: Tensor, made: Tensor) -> Tensor:
    """Let a stand-in read and write the attributes of the tensor for which it stands; return the stand-in."""
    if is_plain(own):
        made.__dict__ = own.__dict__
        return made
    return _with_missing(own.__dict__, made)


def with_copied_attributes_of(own: Tensor, made: Tensor) -> Tensor:
    """Give a stand-in copies of the attributes of the tensor for which it stands; return the stand-in."""
    return _with_missing({name: _copied(value) for name, value in own.__dict__.items()}, made)


def _with_missing(attributes: dict[str, Any], made: Tensor) -> Tensor:
    """Set the attributes that a tensor lacks. Instances of a subclass of Tensor may keep their contents in others."""
    made.__dict__ |= {name: value for name, value in attributes.items() if name not in made.__dict__}
    return made


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if type(value) in (list, dict, set) else value
