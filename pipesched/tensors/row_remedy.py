"""Row remedy: finds the ``split_dims`` that fit a batch whose tensors have different numbers of rows.

Each size of a tensor, and each length of a tuple, can be the number of rows. For each of these numbers, every tensor is
split along a dim of this size, every tuple of this length has one entry for each row, and the rest is not split. The
sample must fit as well. The number that changes the fewest arguments is the answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.tensors.payload import has_a_row_each
from pipesched.tensors.rows import ROWS_PAGE, Argument, Dim
from pipesched.tensors.structures import structure_of
from pipesched.units import counted

__all__ = ["unequal_rows"]

_KEPT = "kept"  # in place of a dim: a value that the dims of the argument fit
_NOTHING = "nothing"  # in place of a dim: a value without tensors


class _Rows(NamedTuple):
    """A possible number of rows of the batch, and of the sample (None: not known)."""

    batch: int
    sample: int | None

    def fit(self, size: int, before: int | None) -> bool:
        return size == self.batch and (before is None or self.sample is None or before == self.sample)


def unequal_rows(
    first: str,
    rows: int,
    what: str,
    other: int,
    given: Sequence[Argument] = (),
    sample: Mapping[Any, Any] = MappingProxyType({}),
) -> InputError:
    """Return the error for two values of a batch with different numbers of rows.

    Args:
        first: the name of a value.
        rows: its number of rows.
        what: the name of the other value.
        other: the number of rows of the other value.
        given: the arguments of the batch, for the remedy.
        sample: the sample's arguments, keyed by position and by name.

    """
    remedy = _fitting_dims(given, sample)
    dims = "or set split_dims=None for an argument that is not split"
    if remedy is not None:
        count, found = remedy
        dims = f"or pass numerics=Numerics(split_dims={found!r}) if the batch has {counted(count, 'row')}"
        dims += " and each micro-batch needs all of a value with None" if _nones(found) else ""
    return InputError(
        f"all tensors of a batch must have the same number of rows; {first} has {counted(rows, 'row')}, {what} has "
        f"{other}; make the numbers equal, {dims}; if rows are packed, split the batch yourself and pass "
        f"microbatches= ({ROWS_PAGE})"
    )


def _fitting_dims(given: Sequence[Argument], sample: Mapping[Any, Any]) -> tuple[int, dict[Any, Any]] | None:
    """Return (number of rows, split_dims); None if no split_dims fit."""
    best: tuple[Any, int, dict[Any, Any]] | None = None
    for rows in _candidates(given, sample):
        own = {one.key: _dims(one.value, one.dim, sample.get(one.key), rows) for one in given}
        changed = [dims for dims in own.values() if dims not in (_KEPT, _NOTHING)]
        if not changed or own.get("target", 0) is None or all(dims in (None, _NOTHING) for dims in own.values()):
            continue
        score = rows.batch == rows.sample, len(changed), _nones(own)
        if best is None or score < best[0]:
            best = score, rows.batch, _spelled(given, own)
    return best and best[1:]


def _spelled(given: Sequence[Argument], own: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return split_dims, without the arguments that are split along dim 0 by default."""
    found = {}
    for argument in given:
        dims = own[argument.key]
        if dims not in (_KEPT, _NOTHING):
            found[argument.key] = dims
        elif argument.dim.explicit or argument.dim.given != 0:
            found[argument.key] = argument.dim.given
    return found


def _candidates(given: Sequence[Argument], sample: Mapping[Any, Any]) -> list[_Rows]:
    """Return the possible numbers of rows. Those that the sample shows rule out others."""
    found = dict.fromkeys(
        rows for one in given for rows in _sizes(one.value, one.dim, sample.get(one.key)) if rows.batch
    )
    return [rows for rows in found if rows.sample is not None] or list(found)


def _sizes(value: Any, dim: Dim, example: Any) -> Iterator[_Rows]:
    if isinstance(value, Tensor):
        before = example.shape if isinstance(example, Tensor) and example.dim() == value.dim() else None
        for number in _numbers(value, dim):
            yield _Rows(value.shape[number], None if before is None else before[number])
        return
    if type(value) is tuple:
        yield _Rows(len(value), len(example) if type(example) is tuple else None)
    for _, one, own, entry in _entries(value, dim, example):
        yield from _sizes(one, own, entry)


def _numbers(tensor: Tensor, dim: Dim) -> list[int]:
    """Return the dims of a tensor, those of the argument first."""
    if tensor.layout != torch.strided:
        return []
    numbers = list(range(tensor.dim()))
    return sorted(numbers, key=lambda number: number not in (dim.number, dim.number + tensor.dim()))


def _dims(value: Any, dim: Dim, example: Any, rows: _Rows) -> Any:
    """Return the dims of a value for ``split_dims``, or one of the marks above."""
    if dim.given is None:
        return _NOTHING
    if isinstance(value, Tensor):
        return _dim_of_tensor(value, dim, example, rows)
    if has_a_row_each(value) or (type(value) is tuple and dim.explicit and dim.given == 0):
        return _KEPT if len(value) == rows.batch else None
    return _dims_of_entries(value, dim, example, rows)


def _dims_of_entries(value: Any, dim: Dim, example: Any, rows: _Rows) -> Any:
    own = {key: _dims(one, inner, entry, rows) for key, one, inner, entry in _entries(value, dim, example)}
    own = {key: dims for key, dims in own.items() if dims != _NOTHING}
    if not own:
        return _NOTHING
    first, *others = own.values()
    equal = all(dims == first for dims in others)
    before = len(example) if isinstance(example, list | tuple) else None
    if isinstance(value, list | tuple) and not (equal and first == _KEPT) and rows.fit(len(value), before):
        return 0 if type(value) is tuple else _KEPT  # the sample shows whether a list has rows
    if equal:
        return first
    return {key: dims for key, dims in own.items() if dims != _KEPT}


def _dim_of_tensor(tensor: Tensor, dim: Dim, example: Any, rows: _Rows) -> Any:
    if not tensor.dim():
        return _NOTHING
    before = example.shape if isinstance(example, Tensor) and example.dim() == tensor.dim() else None
    for number in _numbers(tensor, dim):
        if rows.fit(tensor.shape[number], None if before is None else before[number]):
            return _KEPT if number in (dim.number, dim.number + tensor.dim()) else number
    return None


def _entries(value: Any, dim: Dim, example: Any) -> Iterator[tuple[Any, Any, Dim, Any]]:
    """Yield (key, value, dim, value in the sample) for each entry of a structure."""
    parts = structure_of(value)
    if parts is not None:
        known = None if example is None else structure_of(example)
        before = {} if known is None else dict(zip(known.keys, known.values, strict=True))
        for key, one in zip(parts.keys, parts.values, strict=True):
            yield key, one, dim.inside(key), before.get(key)


def _nones(dims: Any) -> int:
    """Return the number of values that are not split."""
    return sum(map(_nones, dims.values())) if isinstance(dims, Mapping) else int(dims is None)
