"""Rows: the one rule for which parts of a value have rows, that is, one entry for each row of a batch.

- A tensor has its rows along the dimension that ``split_dims`` names for it.
- A numpy array has rows if its size along that dimension is the number of rows.
- A list or a tuple has rows if it has one entry for each row. Other lists and tuples are structures, whose entries are
  judged one by one.
- Dicts, named tuples, dataclasses and objects are structures. Their entries, fields or attributes are judged one by
  one.
- Numbers, text and other plain values have no rows.

A list whose length is the number of rows by chance looks like a list with rows. So the rule compares a batch with the
sample: a list with rows has as many entries as the sample has rows, and a structure has as many entries in every batch.
If both fit, or neither, the list is refused, and the error names the entry of ``split_dims`` that decides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.tensors.payload import has_a_row_each
from pipesched.tensors.structures import structure_of

__all__ = [
    "ROWS_PAGE",
    "Argument",
    "Dim",
    "Place",
    "dense_rows",
    "leaves_with_rows",
    "name_of",
    "parts_inside",
    "remedy_for",
    "size_along",
]

#: The page that explains the rule, for error messages.
ROWS_PAGE = "docs/concepts/rows.md"

#: A key of ``split_dims`` for an argument, followed by the keys, fields and indices of the part inside the argument.
Place = tuple[Any, ...]


@dataclass(frozen=True)
class Dim:
    """The part of ``split_dims`` that applies to a value."""

    #: One dim for all tensors in the value, None (not split), or dims by entry.
    given: Any = 0
    #: Whether the user named this value in ``split_dims``.
    explicit: bool = False
    #: The dim of a tensor; 0 if dims are given by entry.
    number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if isinstance(self.given, int):
            object.__setattr__(self, "number", self.given)

    def inside(self, key: Any) -> "Dim":
        """Return the part that applies to an entry of the value."""
        given = self.given
        if isinstance(given, Mapping):
            return Dim(given[key], explicit=True) if key in given else Dim()
        if isinstance(given, Sequence):
            within = isinstance(key, int) and key < len(given)
            return Dim(given[key], explicit=True) if within else Dim()
        return Dim(given)


class Argument(NamedTuple):
    """A value that is split: an argument of the model, or the target."""

    #: The key of the argument in ``split_dims``.
    key: Any
    value: Any
    dim: Dim

    @property
    def name(self) -> str:
        """The argument's name in error messages."""
        return name_of((self.key,))


def name_of(place: Place) -> str:
    """Return the name of a place in error messages, such as ``batch=['lengths']``."""
    key, *inside = place
    name = "the target" if key == "target" else f"argument {key}" if isinstance(key, int) else f"{key}="
    return name + "".join(f"[{one!r}]" for one in inside)


def remedy_for(place: Place, dim: Any) -> str:
    """Return the ``split_dims`` that gives a place this dim."""
    made = dim
    for key in reversed(place):
        made = {key: made}
    return f"split_dims={made!r}"


def dense_rows(tensor: Tensor, dim: int, place: Place) -> int:
    """Return the size of a tensor along ``dim``. Raises InputError if the tensor cannot be split along this dim."""
    if tensor.layout == torch.strided and -tensor.dim() <= dim < tensor.dim():
        return tensor.shape[dim]
    name = name_of(place)
    if tensor.layout != torch.strided:
        raise InputError(
            f"only dense tensors can be split by rows; {name} has a tensor of layout {tensor.layout}; make the tensor "
            f"dense, or set split_dims=None for this argument"
        )
    raise InputError(
        f"a tensor must have the dim along which it is split; {name} is split along dim {dim}, but has a tensor of "
        f"shape {list(tensor.shape)}; set split_dims for this argument, or set it to None to pass the whole tensor to "
        f"each micro-batch"
    )


def leaves_with_rows(
    place: Place, value: Any, dim: Dim, above: tuple[int, ...] = ()
) -> Iterator[tuple[Place, Any, int]]:
    """Yield (place, value, dim) for each tensor outside lists, each list of dicts, and each list in split_dims."""
    if dim.given is None or id(value) in above:
        return
    if isinstance(value, Tensor):
        if value.dim():
            yield place, value, dim.number
    elif has_a_row_each(value) or (dim.explicit and dim.given == 0 and _is_list(value)):
        yield place, value, 0
    elif type(value) is tuple or not _is_list(value) or isinstance(dim.given, Sequence | Mapping):
        for inner, one, own in parts_inside(place, value, dim):
            yield from leaves_with_rows(inner, one, own, (*above, id(value)))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | np.ndarray) or type(value) is tuple


def parts_inside(place: Place, value: Any, dim: Dim) -> Iterator[tuple[Place, Any, Dim]]:
    """Yield (place, value, dim) for each entry, field or attribute of a structure."""
    parts = structure_of(value)
    if parts is not None:
        for key, one in zip(parts.keys, parts.values, strict=True):
            yield (*place, key), one, dim.inside(key)


def size_along(value: Any, dim: Dim) -> int | None:
    """Return the size of a tensor or an array along its dim; None for other values and for scalars."""
    if isinstance(value, Tensor | np.ndarray) and dim.given is not None:
        number = dim.number
        return value.shape[number] if -value.ndim <= number < value.ndim else None
    return None
