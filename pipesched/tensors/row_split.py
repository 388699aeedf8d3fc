"""Row split: splits the values of a batch by rows; see ``rows`` for the rule."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.program.near_equal_parts import near_equal_parts
from pipesched.tensors.payload import has_a_row_each, is_record, pytree
from pipesched.tensors.row_evidence import Evidence, fit_rows, not_a_row_each
from pipesched.tensors.row_remedy import unequal_rows
from pipesched.tensors.rows import Argument, Dim, Place, dense_rows, name_of, remedy_for, size_along
from pipesched.tensors.structures import PLAIN, structure_of

__all__ = ["RowSplit"]


@dataclass
class RowSplit:
    """Splits the values of one batch into parts by rows.

    Args:
        evidence: what the sample and earlier batches show about lists.
        rows: the batch's number of rows.
        sizes: the number of rows of each part.
        chosen: for each part, the rows to choose. Default: None (the parts are consecutive rows, and tensors are split
            into views).
        given: all arguments of the batch, for error messages.

    """

    evidence: Evidence
    rows: int
    sizes: Sequence[int]
    chosen: Sequence[Sequence[int]] | None = None
    given: Sequence[Argument] = ()
    #: Whether parts with the same number of rows can contain tensors of different shapes.
    uneven: bool = False

    @classmethod
    def choosing(cls, rows: int, chosen: Sequence[Sequence[int]]) -> "RowSplit":
        """Return a split whose parts are these rows of a batch. Each list of the batch's length has rows."""
        return cls(Evidence(), rows, [len(part) for part in chosen], chosen)

    @classmethod
    def into(cls, evidence: Evidence, rows: int, parts: int) -> "RowSplit":
        """Split a batch into nearly equal parts."""
        return cls(evidence, rows, near_equal_parts(rows, parts))

    def parts(self, argument: Argument) -> list[Any]:
        """Return the parts of an argument. A value without rows is in every part."""
        direct = self.chosen is None and not self.evidence.unequal
        if direct and isinstance(argument.value, Tensor) and argument.value.dim():
            if argument.dim.given is not None:  # rows_of_batch has checked the number of rows
                return list(torch.tensor_split(argument.value, len(self.sizes), argument.dim.number))
            return [argument.value] * len(self.sizes)
        made = self._cut((argument.key,), argument.value, argument.dim, self.evidence.sample.get(argument.key), ())
        return [argument.value] * len(self.sizes) if made is None else made

    def _cut(self, place: Place, value: Any, dim: Dim, example: Any, above: tuple[int, ...]) -> list[Any] | None:
        """Return the parts of a value; None if the value has no rows, so that every part contains it."""
        if dim.given is None or value is None or id(value) in above:
            return None
        if isinstance(value, Tensor):
            return self._cut_tensor(place, value, dim, example) if value.dim() else None
        if isinstance(value, np.ndarray):
            return self._cut_array(place, value, dim, example) if value.ndim else None
        if self._is_by_row(place, value, dim, example):
            self.uneven = True
            return self._items(value)
        return self._cut_structure(place, value, dim, example, above)

    def _cut_structure(
        self, place: Place, value: Any, dim: Dim, example: Any, above: tuple[int, ...]
    ) -> list[Any] | None:
        self._check_plain(place, value, example)
        parts = structure_of(value)
        if parts is None:
            return None
        cut = [
            self._cut((*place, key), one, dim.inside(key), _entry(example, number, key), (*above, id(value)))
            for number, (key, one) in enumerate(zip(parts.keys, parts.values, strict=True))
        ]
        if all(own is None for own in cut):
            return None
        self._check_class(place, value)
        return [
            parts.rebuilt([one if own is None else own[part] for one, own in zip(parts.values, cut, strict=True)])
            for part in range(len(self.sizes))
        ]

    def _cut_tensor(self, place: Place, tensor: Tensor, dim: Dim, example: Any) -> list[Tensor]:
        has = dense_rows(tensor, dim.number, place)
        if has != self.rows:
            raise unequal_rows("the batch", self.rows, name_of(place), has)
        self._check_sample(place, example, dim)
        if self.chosen is None:
            return list(torch.tensor_split(tensor, len(self.sizes), dim.number))
        made = []
        for rows in self.chosen:
            index = torch.tensor(rows, device=tensor.device)
            picked = tensor.detach().index_select(dim.number, index)
            made.append(picked.requires_grad_(tensor.requires_grad))
        return made

    def _check_sample(self, place: Place, example: Any, dim: Dim) -> None:
        """Raise InputError if the sample's tensor in this place has another number of rows than the sample."""
        known, has = self.evidence.rows, size_along(example, dim)
        if known is not None and has is not None and has != known and not self._is_whole:
            what = f"in the sample, {name_of(place)}"
            raise unequal_rows("the sample", known, what, has, self.given, self.evidence.sample)

    def _cut_array(self, place: Place, array: Any, dim: Dim, example: Any) -> list[Any] | None:
        length = size_along(array, dim)
        if length is None:
            raise InputError(
                f"an array must have the dim along which it is split; {name_of(place)} is split along dim "
                f"{dim.number}, but has shape {list(array.shape)}; pass {remedy_for(place, None)} if each micro-batch "
                f"needs the whole array"
            )
        if dim.explicit:
            if length != self.rows:
                raise not_a_row_each(place, length, self.rows)
        elif self._is_whole or not self.evidence.has_rows(place, array, example, length, self.rows, dim):
            return None
        return [np.take(array, rows, axis=dim.number) for rows in self._row_numbers()]

    def _is_by_row(self, place: Place, value: Any, dim: Dim, example: Any) -> bool:
        """Return whether a list or a tuple has one entry for each row."""
        if not isinstance(value, list) and type(value) is not tuple:
            return False
        if has_a_row_each(value):
            if len(value) != self.rows:
                raise InputError(
                    f"a list of dicts must have one dict for each row of a batch; {name_of(place)} has a list of "
                    f"length {len(value)}, but the number of rows is {self.rows}; pass a list of length {self.rows}"
                )
            return True
        if isinstance(dim.given, Sequence | Mapping):
            return False
        if dim.explicit and dim.given == 0:
            if len(value) != self.rows:
                raise not_a_row_each(place, len(value), self.rows)
            return True
        if self._is_whole:
            return bool(value) and len(value) == self.rows and not fit_rows(value, self.rows, dim)
        return self.evidence.has_rows(place, value, example, len(value), self.rows, dim)

    def _check_plain(self, place: Place, value: Any, example: Any) -> None:
        """Raise InputError for a number or a container of an unknown kind that seems to depend on the rows."""
        if isinstance(value, PLAIN):
            self._check_number(place, value, example)
        else:
            self._check_container(place, value)

    def _check_number(self, place: Place, value: Any, example: Any) -> None:
        """Raise InputError if a number is the number of rows, because each micro-batch has fewer rows."""
        known = self.evidence.rows
        if (
            type(value) is int
            and type(example) is int
            and (value, example) == (self.rows, known)
            and self.rows != known
            and len(self.sizes) > 1
        ):
            raise InputError(
                f"a number must be right for each micro-batch; {name_of(place)} is {value}, the number of rows of the "
                f"batch, and was {example} for the sample of {example} rows, but a micro-batch has "
                f"{max(self.sizes)} rows; let the model read the number of rows from a tensor, or split the batch "
                f"yourself and pass microbatches="
            )

    def _check_container(self, place: Place, value: Any) -> None:
        """Raise InputError if a container of an unknown kind has one entry for each row."""
        known = isinstance(value, list | tuple | Mapping) or is_record(value) or not isinstance(value, Sized)
        if not known and len(self.sizes) > 1 and len(value) == self.rows:
            raise InputError(
                f"only tensors, arrays, lists and tuples can have one entry for each row; {name_of(place)} is an "
                f"object of class {type(value).__qualname__} with {len(value)} entries, and the batch has "
                f"{self.rows} rows; pass a list or a tensor, or {remedy_for(place, None)} if each micro-batch needs "
                f"all entries"
            )

    def _check_class(self, place: Place, value: Any) -> None:
        kind = type(value)
        if kind.__module__.split(".")[0] == "torch" and kind not in pytree.SUPPORTED_NODES:
            raise InputError(
                f"an object of a class of torch cannot be split by rows; {name_of(place)} is an object of class "
                f"{kind.__qualname__}; pass its tensors instead, or split the batch yourself and pass microbatches="
            )

    @property
    def _is_whole(self) -> bool:
        """Whether the only part is the batch itself."""
        return len(self.sizes) == 1 and self.chosen is None

    def _row_numbers(self) -> list[Sequence[int]]:
        if self.chosen is not None:
            return list(self.chosen)
        return [range(begin, end) for begin, end in pairwise(accumulate(self.sizes, initial=0))]

    def _items(self, value: Any) -> list[Any]:
        return [type(value)([value[row] for row in rows]) for rows in self._row_numbers()]


def _entry(example: Any, number: int, key: Any) -> Any:
    """Return the entry of a sample's value that corresponds to an entry of a batch's value; None if there is none."""
    parts = None if example is None else structure_of(example)
    if parts is None or number >= len(parts.values):
        return None
    return parts.values[number] if parts.keys[number] == key else None
