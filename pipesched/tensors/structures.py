"""Structures: takes values apart by one level, and builds the same kind of value from other parts.

Structures are lists, tuples, dicts, named tuples, dataclasses, values that are registered with torch's pytrees, and
objects of other classes, whose parts are their attributes.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pipesched.tensors.payload import fields_of, is_record, pytree, record_of

__all__ = ["PLAIN", "Structure", "is_opaque", "object_tensors", "structure_of"]

#: Types of values without parts. (Tensors and arrays have no parts either.)
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    type,
    nn.Module,
    torch.Size,
    torch.dtype,
    torch.device,
    np.generic,
)


class Structure(NamedTuple):
    """A value that is taken apart by one level."""

    kind: type
    keys: Sequence[Any]
    values: Sequence[Any]
    #: Builds a value of the same kind from other values.
    rebuilt: Callable[[Sequence[Any]], Any]
    #: Whether the value is an object whose class pipesched does not know.
    is_object: bool = False


def structure_of(value: Any) -> Structure | None:
    """Take a value apart by one level. Return None for a value without parts."""
    if isinstance(value, (*PLAIN, Tensor, np.ndarray)) or value is None:
        return None
    kind = type(value)
    if isinstance(value, list) or kind is tuple:
        return Structure(kind, range(len(value)), value, kind)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Structure(kind, value._fields, value, lambda made: kind(*made))
    if is_record(value) and kind not in pytree.SUPPORTED_NODES:
        fields = fields_of(value)
        return Structure(
            kind,
            list(fields),
            list(fields.values()),
            lambda made: record_of(kind, dict(zip(fields, made, strict=True))),
        )
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda one: one is not value)
    if not (len(leaves) == 1 and leaves[0] is value):
        keys: Sequence[Any] = range(len(leaves))
        if isinstance(value, Mapping) and len(value) == len(leaves):
            keys = list(value)
        return Structure(kind, keys, leaves, lambda made: pytree.tree_unflatten(list(made), spec))
    return _object_structure(value)


def _object_structure(value: Any) -> Structure | None:
    """Take an object apart into its attributes. Parts are put into shallow copies of the object."""
    slots = () if callable(value) else _set_slots(value)
    if callable(value) or not (slots or hasattr(value, "__dict__")):
        return None
    held = {**{name: object.__getattribute__(value, name) for name in slots}, **getattr(value, "__dict__", {})}

    def rebuilt(made: Sequence[Any]) -> Any:
        other = copy.copy(value)
        for name, one in zip(held, made, strict=True):
            object.__setattr__(other, name, one) if name in slots else vars(other).update({name: one})
        return other

    return Structure(type(value), list(held), list(held.values()), rebuilt, is_object=True)


def _set_slots(value: Any) -> Sequence[str]:
    """Return the names of the attributes that an object has in the ``__slots__`` of its classes."""
    found = []
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            own = f"_{kind.__name__.lstrip('_')}{name}" if private else name
            with suppress(AttributeError):  # a slot without a value
                object.__getattribute__(value, own)
                found += [own] if name not in ("__dict__", "__weakref__") else []
    return tuple(dict.fromkeys(found))


def object_tensors(value: Any, above: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Iterate over the tensors in an object whose class pipesched does not know; over none for any other value."""
    parts = None if id(value) in above else structure_of(value)
    if parts is not None and (parts.is_object or above):
        for one in parts.values:
            if isinstance(one, Tensor):
                yield one
            else:
                yield from object_tensors(one, (*above, id(value)))


def is_opaque(value: Any) -> bool:
    """Return whether a value is an object with tensors whose class pipesched does not know."""
    return any(True for _ in object_tensors(value))
