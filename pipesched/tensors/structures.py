"""Structures: takes values apart by one level, and builds the same kind of value from other parts.

Structures are lists, tuples, dicts, named tuples, dataclasses, values that are registered with torch's pytrees, and
objects of other classes, whose parts are their attributes.
"""

import datetime
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import torch
from torch import Tensor, nn

from pipesched.tensors.payload import fields_of, is_record, pytree, record_of

__all__ = ["NUMBERS", "PLAIN", "Structure", "is_opaque", "object_tensors", "structure_of"]

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
    torch.layout,
    torch.memory_format,
    np.generic,
    np.dtype,
    Decimal,
    Fraction,
    PurePath,
    UUID,
    datetime.date,
    datetime.time,
    datetime.timedelta,
)
#: Types of immutable values, such as sizes, which may depend on the batch.
NUMBERS = (*(kind for kind in PLAIN if kind is not nn.Module), range)


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
    return _slice_structure(value) if kind is slice else _object_structure(value)


def _slice_structure(value: slice) -> Structure:
    bounds = value.start, value.stop, value.step
    return Structure(slice, ("start", "stop", "step"), bounds, lambda made: slice(*made))


def _object_structure(value: Any) -> Structure | None:
    """Take an object apart into its attributes and, if it is a dict, its entries."""
    kind = type(value)
    base = _base_of(kind)
    if base not in (object, SimpleNamespace, dict):
        return None
    entries = dict(value) if base is dict else {}
    attributes = _attributes_of(value)
    if not (attributes or base is dict or kind.__dictoffset__):
        return None

    def rebuilt(made: Sequence[Any]) -> Any:
        other = base.__new__(kind)
        if entries:
            dict.update(other, zip(entries, made, strict=False))
        for name, part in zip(attributes, made[len(entries) :], strict=True):
            object.__setattr__(other, name, part)
        return other

    return Structure(kind, [*entries, *attributes], [*entries.values(), *attributes.values()], rebuilt, is_object=True)


def _base_of(kind: type) -> type:
    """Return the nearest base class that is implemented in C, such as object, dict or list."""
    return next(base for base in kind.__mro__ if not base.__flags__ & _MADE_IN_PYTHON)


_MADE_IN_PYTHON = 1 << 9


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, without running the class's own ``__getattribute__``."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{kind.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot
            if name not in ("__dict__", "__weakref__"):
                with suppress(AttributeError):  # a slot that was never set
                    found[name] = object.__getattribute__(value, name)
    return found | (object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else {})


def object_tensors(value: Any, above: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Iterate over the tensors in an object whose class pipesched does not know; over none for any other value."""
    if id(value) in above:
        return
    parts = structure_of(value)
    held = _held(value) if parts is None else ()
    if parts is not None and (parts.is_object or above):
        held = parts.values
    for one in held:
        if isinstance(one, Tensor):
            yield one
        else:
            yield from object_tensors(one, (*above, id(value)))


def _held(value: Any) -> Sequence[Any]:
    """Return the variables of a closure or the entries of a set or deque; nothing for other values."""
    if isinstance(value, FunctionType):
        with suppress(ValueError):  # a variable that is not set yet
            return list(inspect.getclosurevars(value).nonlocals.values())
    return list(value) if isinstance(value, (set, frozenset, deque)) else ()


def is_opaque(value: Any) -> bool:
    """Return whether a value is an object with tensors whose class pipesched does not know."""
    return any(True for _ in object_tensors(value))
