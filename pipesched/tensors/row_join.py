"""Row join: joins the outputs of micro-batches, as the inverse of splitting a batch by rows.

A tensor is concatenated along the dimension whose size is proportional to the number of rows. If all micro-batches have
the same number of rows, every size looks proportional. The sizes are then compared with the output of a probe, which
has another number of rows. An output without such a dimension, or with several of them, comes back as a list with one
entry for each micro-batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.tensors.payload import has_a_row_each
from pipesched.tensors.rows import ROWS_PAGE, Dim, Place, name_of
from pipesched.tensors.structures import Structure, is_opaque, object_tensors, structure_of

__all__ = ["OutputRows", "Unavailable"]

#: (inputs of a micro-batch, number of rows) -> (output, number of rows) of a run with another number of rows. None if
#: there is no such run.
Probe = Callable[[Any, int], tuple[Any, int] | None]

_ABSENT = object()


def _no_probe(inputs: Any, rows: int) -> None:
    return None


class OutputRows:
    """Joins the outputs of micro-batches, and remembers in which dimensions the outputs of a model have rows.

    Args:
        probe: runs the model's code on another number of rows. Default: no probe.

    """

    def __init__(self, probe: Probe = _no_probe) -> None:
        self._probe = probe
        self._known: dict[Place, int | None] = {}  # None: the tensor has no rows
        self._by_row: dict[Place, bool] = {}

    def joined(self, values: Sequence[Any], rows: Sequence[int], dim: Dim, inputs: Any = None) -> Any:
        """Return the output of the whole batch.

        Args:
            values: the output of each micro-batch.
            rows: the number of rows of each micro-batch.
            dim: the part of ``split_dims`` for the output.
            inputs: the inputs (args, kwargs) of the first micro-batch. Default: unknown.

        Raises:
            InputError: an output cannot be joined along the dimension that ``split_dims`` names.

        """
        return _Join(rows, partial(self._probe, inputs), self._known, self._by_row).of(("output",), values, dim)


class _Join:
    """Joins the outputs of one batch."""

    def __init__(
        self,
        rows: Sequence[int],
        probe: Callable[[int], tuple[Any, int] | None],
        known: dict[Place, int | None],
        by_row: dict[Place, bool],
    ) -> None:
        self._rows = list(rows)
        self._probe = probe
        self._known = known
        self._by_row = by_row
        self._probed: tuple[Any, int] | None = None
        self._has_probed = False
        #: A tensor that is in several places is joined once.
        self._joined: dict[tuple[int, ...], Any] = {}

    def of(self, place: Place, values: Sequence[Any], dim: Dim) -> Any:
        """Join the values in one place of the outputs."""
        first = values[0]
        if dim.given is None:
            return list(values) if len(values) > 1 else first
        if all(isinstance(value, Tensor) for value in values):
            key = tuple(map(id, values))
            if key not in self._joined:
                self._joined[key] = self._tensor(place, values, dim)
            return self._joined[key]
        if all(isinstance(value, np.ndarray) for value in values) and first.ndim:
            at = self._dim_of(place, values, dim)
            return list(values) if at is None else np.concatenate(values, at)
        return self._other(place, values, dim)

    def _other(self, place: Place, values: Sequence[Any], dim: Dim) -> Any:
        """Join values that are neither tensors nor arrays."""
        first = values[0]
        if any(map(is_opaque, values)):
            closed = [_closed(place, value) for value in values]
            return closed if len(closed) > 1 else closed[0]
        if (
            len(values) > 1
            and all(isinstance(value, list) or type(value) is tuple for value in values)
            and self._is_by_row(place, values)
        ):
            return type(first)([item for value in values for item in value])
        joined = self._parts(place, values, dim)
        if joined is not None:
            return joined[0]
        return first if all(_same(first, value) for value in values) else list(values)

    def _parts(self, place: Place, values: Sequence[Any], dim: Dim) -> tuple[Any] | None:
        """Join the entries of equal structures. Return None for values without entries, or of different structures."""
        parts = [structure_of(value) for value in values]
        first = parts[0]
        if first is None or not all(_alike(first, one) for one in parts) or not len(first.keys):
            return None
        columns = zip(*(one.values for one in parts if one is not None), strict=True)
        made = [
            self.of((*place, key), column, dim.inside(key)) for key, column in zip(first.keys, columns, strict=True)
        ]
        return (first.rebuilt(made),)

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def _tensor(self, place: Place, pieces: Sequence[Tensor], dim: Dim) -> Any:
        here = pieces[0].device
        pieces = [piece.to(here) for piece in pieces]  # chains of stages may end on different devices
        if not pieces[0].dim():
            return torch.stack(pieces) if all(not piece.dim() for piece in pieces) else pieces
        at = 0 if len(pieces) == 1 else self._dim_of(place, pieces, dim)
        if at is None or len({(*piece.shape[:at], *piece.shape[at + 1 :]) for piece in pieces}) > 1:
            return [piece.clone() for piece in pieces]
        return torch.cat(pieces, at)

    def _dim_of(self, place: Place, pieces: Sequence[Any], dim: Dim) -> int | None:
        """Return the dim along which tensors are concatenated; None if they cannot be concatenated."""
        depth: int = pieces[0].ndim
        if dim.explicit and isinstance(dim.given, int):
            if not -depth <= dim.given < depth:
                raise InputError(
                    f"an output must have the dim along which it is concatenated; {_name(place)} has a tensor of shape "
                    f"{list(pieces[0].shape)}, but split_dims names dim {dim.given}; correct split_dims ({ROWS_PAGE})"
                )
            return dim.given % depth
        if any(piece.ndim != depth for piece in pieces):
            return None
        if place in self._known:
            return self._known[place]
        shapes = [tuple(piece.shape) for piece in pieces]
        rows = list(self._rows)
        if len(set(rows)) == 1:
            example = self._example(place)
            if isinstance(example, Tensor | np.ndarray) and example.ndim == depth:
                shapes.append(tuple(example.shape))
                rows.append(self._probed[1] if self._probed else 0)
            else:
                return self._likely(shapes[0], dim.number % depth if -depth <= dim.number < depth else 0)
        fitting = [at for at in range(depth) if _is_proportional([shape[at] for shape in shapes], rows)]
        self._known[place] = fitting[0] if len(fitting) == 1 else None
        return self._known[place]

    def _likely(self, shape: Sequence[int], dim: int) -> int | None:
        """Return the dim of the rows if only one dim has the size of a micro-batch; None if that is not clear."""
        fitting = [at for at, size in enumerate(shape) if size == self._rows[0]]
        return dim if fitting == [dim] else None

    def _example(self, place: Place) -> Any:
        """Return the value in a place of the probe's output, or a marker if there is none."""
        if not self._has_probed:
            self._has_probed = True
            self._probed = self._probe(self._rows[0])
        if self._probed is None:
            return _ABSENT
        value = self._probed[0]
        for key in place[1:]:
            parts = structure_of(value)
            if parts is None or key not in parts.keys:
                return _ABSENT
            value = parts.values[list(parts.keys).index(key)]
        return value

    # ---- lists ------------------------------------------------------------------------------------------------------

    def _is_by_row(self, place: Place, values: Sequence[Any]) -> bool:
        """Return whether each list has one entry for each row of its micro-batch."""
        lengths = [len(value) for value in values]
        if lengths != self._rows:
            return False
        if place in self._by_row or len(set(lengths)) > 1:
            return self._by_row.setdefault(place, True)
        example = self._example(place)
        if isinstance(example, list | tuple) and self._probed is not None:
            return self._by_row.setdefault(place, len(example) == self._probed[1])
        return all(map(has_a_row_each, values)) or not any(isinstance(item, Tensor) for item in values[0])


def _is_proportional(sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Return whether every size is the same multiple of its number of rows."""
    times = sizes[0] // rows[0]
    return times > 0 and all(size == times * count for size, count in zip(sizes, rows, strict=True))


def _alike(one: Structure, other: Structure | None) -> bool:
    return other is not None and list(one.keys) == list(other.keys) and one.kind is other.kind


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (RuntimeError, ValueError):
        return False


def _name(place: Place) -> str:
    inside = name_of((0, *place[1:])).removeprefix("argument 0")
    return f"the output{inside}"


def _closed(place: Place, value: Any) -> Any:
    """Return an object of an output, with tensors that are detached from the graph of their stage.

    If a tensor of the object has no values in the last stage, the result raises an error when it is used.
    """
    if any(tensor.is_meta for tensor in object_tensors(value)):
        return Unavailable(_name(place), type(value).__qualname__)
    parts = structure_of(value) if is_opaque(value) else None
    if parts is None:
        return value
    return parts.rebuilt([one.detach() if isinstance(one, Tensor) else _closed(place, one) for one in parts.values])


class Unavailable:
    """Stands for an object in an output, with tensors that other stages have computed and not sent to the last stage.

    Raises InputError if one of its attributes is read.
    """

    def __init__(self, name: str, kind: str) -> None:
        self._why = name, kind

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        name, kind = self._why
        raise InputError(
            f"an object inside an output must have been computed by the last stage; {name} is an object of class "
            f"{kind}, with tensors of other stages; let the model return these tensors in a dict or a dataclass, or "
            f"call the model without a pipeline ({ROWS_PAGE})"
        )
