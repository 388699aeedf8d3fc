"""Row count: finds a batch's number of rows."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.tensors.row_remedy import unequal_rows
from pipesched.tensors.rows import (
    Argument,
    Dim,
    Place,
    dense_rows,
    leaves_with_rows,
    name_of,
    parts_inside,
    size_along,
)
from pipesched.tensors.structures import PLAIN

__all__ = ["row_counts", "rows_of_batch"]


def rows_of_batch(given: Sequence[Argument], sample: Mapping[Any, Any] = MappingProxyType({})) -> int:
    """Return a batch's number of rows: that of its first tensor, else of its first array or list.

    Args:
        given: the arguments of the batch.
        sample: the sample's arguments, for the remedy in an error.

    Raises:
        InputError: the batch has no rows, or its arguments have different numbers of rows.

    """
    first: Place | None = None
    rows = 0
    for argument in given:
        key, value, own = argument
        is_one = isinstance(value, Tensor) and value.dim() and own.given is not None
        leaves = [((key,), value, own.number)] if is_one else leaves_with_rows((key,), value, own)
        for place, leaf, dim in leaves:
            has = dense_rows(leaf, dim, place) if isinstance(leaf, Tensor) else len(leaf)
            if first is None:
                first, rows = place, has
            elif has != rows:
                raise unequal_rows(name_of(first), rows, name_of(place), has, given, sample)
    if first is None:
        found = (one for argument in given for one in _perhaps((argument.key,), argument.value, argument.dim, ()))
        first, rows = next(found, (None, 0))
    if first is None:
        raise InputError(
            "a batch must contain a tensor that can be split by rows; this batch contains no such tensor; pass a tensor"
        )
    if rows == 0:
        raise InputError(f"a batch must have at least one row; {name_of(first)} has no rows; skip the empty batch")
    return rows


def row_counts(given: Sequence[Argument]) -> dict[Place, int]:
    """Return the number of rows of each tensor and each list of dicts of a micro-batch, by place.

    Tensors that cannot be split by rows are left out.
    """
    return {
        place: leaf.shape[dim] if isinstance(leaf, Tensor) else len(leaf)
        for argument in given
        for place, leaf, dim in leaves_with_rows((argument.key,), argument.value, argument.dim)
        if not isinstance(leaf, Tensor) or (leaf.layout == torch.strided and -leaf.dim() <= dim < leaf.dim())
    }


def _perhaps(place: Place, value: Any, dim: Dim, above: tuple[int, ...]) -> Iterator[tuple[Place, int]]:
    """Yield the numbers of rows of lists and arrays, for a batch without other rows."""
    if dim.given is None or id(value) in above:
        return
    if isinstance(value, np.ndarray):
        yield from [(place, size) for size in [size_along(value, dim)] if size is not None]
    elif isinstance(value, list) and value:
        sizes = {size_along(one, dim) for one in value}
        columns = isinstance(value[0], Tensor) and len(sizes) == 1 and None not in sizes
        yield place, (sizes.pop() or 0) if columns else len(value)
    elif type(value) is tuple and value and all(isinstance(one, PLAIN) for one in value):
        yield place, len(value)
    else:
        for inner, one, own in parts_inside(place, value, dim):
            yield from _perhaps(inner, one, own, (*above, id(value)))
