"""Row evidence: finds whether a list has one entry for each row of a batch, from the sample and earlier batches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from pipesched.errors import InputError
from pipesched.tensors.payload import pytree
from pipesched.tensors.rows import ROWS_PAGE, Dim, Place, name_of, remedy_for, size_along
from pipesched.units import counted

__all__ = ["Evidence", "fit_rows", "not_a_row_each"]


@dataclass
class Evidence:
    """What the sample and earlier batches show about lists and arrays.

    Args:
        sample: the sample's arguments, keyed by position and by name.
        rows: the number of rows of the sample's first tensor; None if it has none.
        unequal: whether the sample's tensors have different numbers of rows.

    """

    sample: Mapping[Any, Any] = field(default_factory=dict)
    rows: int | None = None
    unequal: bool = False
    #: Places at which a batch has shown whether a list has rows.
    decided: dict[Place, bool] = field(default_factory=dict)
    #: For places that the sample lacks, such as those in a target: (length, number of rows) in the first batch.
    first: dict[Place, tuple[int, int]] = field(default_factory=dict)
    #: Whether a batch has shown that its rows are in the dims that are split; see ``check_layout``.
    layout_known: bool = False

    def has_rows(self, place: Place, value: Any, example: Any, length: int, rows: int, dim: Dim) -> bool:
        """Return whether a list or an array has one entry for each row.

        Args:
            place: where the list is.
            value: the list.
            example: the value in the same place of the sample.
            length: the list's length.
            rows: the batch's number of rows.
            dim: the dim along which tensors in the list are split.

        Raises:
            InputError: the sample and the batches do not show whether the list has rows.

        """
        known = self.decided.get(place)
        if known is not None:
            if known and length != rows:
                raise not_a_row_each(place, length, rows)
            return known
        before = None if self.rows is None or example is None else _length(example, dim)
        then = (before, self.rows) if before is not None else self.first.setdefault(place, (length, rows))
        return self._judged(place, value, example, (length, rows), then, dim)

    def _judged(
        self, place: Place, value: Any, example: Any, now: tuple[int, int], then: tuple[Any, Any], dim: Dim
    ) -> bool:
        length, rows = now
        by_row = length == rows and then[0] == then[1]
        fixed = length == then[0]
        if by_row and fixed:
            return self._of_equal_rows(place, value, example, then, dim)
        if by_row:
            self.decided[place] = True
            return True
        if fixed and length != rows and then[0] != then[1]:
            self.decided[place] = False
            return False
        if fixed and length == rows and fit_rows(value, rows, dim):  # for example, two tensors and two rows
            return False
        if fixed and length != rows and place not in self.first:  # for example, two numbers and a sample of two rows
            self.decided[place] = False
            return False
        if not length:
            return False
        raise _unclear(place, length, rows, then, "the sample" if place not in self.first else "an earlier batch")

    def _of_equal_rows(self, place: Place, value: Any, example: Any, then: tuple[Any, Any], dim: Dim) -> bool:
        """Judge a list of the sample's length in a batch that has as many rows as the sample."""
        if isinstance(value, np.ndarray):
            return True
        if fit_rows(value, then[1], dim):
            if type(value) is tuple:
                return False
            raise _unclear(place, len(value), then[1], then, "its tensors, which also have this number of rows")
        if place not in self.first and not any(True for _ in _tensors(value)) and _equal(value, example):
            raise _unclear(place, len(value), then[1], then, "the sample")
        return True


def _length(value: Any, dim: Dim) -> int | None:
    if isinstance(value, np.ndarray):
        return size_along(value, dim)
    return len(value) if isinstance(value, list | tuple) else None


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # the lists contain objects with tensors or arrays
        return False


def _tensors(value: Any) -> Iterator[Tensor | np.ndarray]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim:
            yield leaf


def fit_rows(value: Any, rows: int, dim: Dim) -> bool:
    """Return whether a value contains tensors, and all of them have this number of rows along their own dim."""
    sizes = {size_along(one, dim) for one in _tensors(value)}
    return sizes == {rows}


def not_a_row_each(place: Place, length: int, rows: int) -> InputError:
    """Return the error for a list with rows whose length is not the batch's number of rows."""
    return InputError(
        f"a list with one entry for each row must have as many entries as the batch has rows; {name_of(place)} has "
        f"{length} entries, but the batch has {counted(rows, 'row')}; pass one entry for each row, or "
        f"{remedy_for(place, None)} if each micro-batch needs the whole list"
    )


def _unclear(place: Place, length: int, rows: int, then: tuple[Any, Any], source: str) -> InputError:
    before = f"{then[0]} entries and {then[1]} rows in {source}"
    if source.startswith("its"):
        before = f"and so do {source}"
    return InputError(
        f"it must be clear whether a list has one entry for each row; {name_of(place)} has {length} entries in a batch "
        f"of {counted(rows, 'row')}, {before}; pass numerics=Numerics({remedy_for(place, 0)}) if the "
        f"list has one entry for each row, or {remedy_for(place, None)} if each micro-batch needs the whole list "
        f"({ROWS_PAGE})"
    )
