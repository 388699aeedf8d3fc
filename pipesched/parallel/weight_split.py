"""Weight split: which block of a weight each rank of a tensor group holds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from pipesched.errors import InputError
from pipesched.simulation.tensor_layout import Axis, TensorLayout

__all__ = ["GridSplit", "Split", "SplitWeights", "WeightSplit"]


@dataclass(frozen=True, kw_only=True)
class WeightSplit:
    """How the ranks of a tensor group divide a weight.

    ::

        WeightSplit(dim=0).own(linear.weight, rank=1, size=2)  # the second half of the rows

    Attributes:
        dim: the dimension that is divided.
        sections: the sizes, in the whole weight, of the parts of this dimension that are each divided, such as those of
            queries, keys and values in one weight. Default: () (the dimension is one part).

    """

    dim: int
    sections: tuple[int, ...] = ()

    def own(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return the block of a rank of a whole weight. A block that lies in one piece is a view."""
        parts = [part.chunk(size, self.dim)[rank] for part in self._parts(whole, self._whole_sections(whole.shape))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def joined(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the whole weight. ``blocks`` are those of all ranks, in rank order."""
        shape = self.whole_shape(blocks[0].shape, len(blocks))
        own = [length // len(blocks) for length in self._whole_sections(shape)]
        pieces = [self._parts(block, own) for block in blocks]
        return torch.cat([*chain.from_iterable(zip(*pieces, strict=True))], self.dim)

    def whole_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of the whole weight, given that of a block."""
        return tuple(length * size if dim == self.dim else length for dim, length in enumerate(shape))

    def own_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of a block, given that of the whole weight."""
        return tuple(length // size if dim == self.dim else length for dim, length in enumerate(shape))

    def check(self, shape: Sequence[int], size: int, place: str) -> None:
        """Raise InputError if a whole weight of this shape cannot be divided evenly. ``place`` names the weight."""
        for length in self._whole_sections(shape):
            if length % size:
                raise InputError(
                    f"a weight must be divided evenly among the ranks of a tensor group; dimension {self.dim} of "
                    f"{place} has {length} elements for {size} ranks; choose a number of ranks that divides {length}, "
                    f"or leave this weight out of tensor_parallel="
                )

    @property
    def divides_rows(self) -> bool:
        """Whether the blocks have fewer rows than the whole weight."""
        return self.dim == 0

    @property
    def reads_whole(self) -> bool:
        """Whether the rows of a block are not in one piece, so that a rank reads the whole weight from a checkpoint."""
        return self.dim == 0 and bool(self.sections)

    def counts(self, rank: int) -> bool:
        """Return whether a rank is the first of those that hold its block. Each rank holds a block of its own."""
        return True

    def _whole_sections(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.sections or (shape[self.dim],)

    def _parts(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = tensor.split(list(sizes), self.dim)
        return parts


@dataclass(frozen=True, kw_only=True)
class GridSplit:
    """How the ranks of a grid divide a weight in several dimensions.

    Attributes:
        layout: the layout of the grid.
        dims: for each dimension of the weight, the axes that divide it.
        sections: as in `WeightSplit`, for the first dimension. Default: ().

    """

    layout: TensorLayout
    dims: tuple[tuple[Axis, ...], ...]
    sections: tuple[int, ...] = ()

    divides_rows = True
    reads_whole = True

    def own(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return the block of a rank of a whole weight."""
        for split, axes in self._divided():
            whole = split.own(whole, self.layout.place(rank, axes), self.layout.length(axes))
        return whole

    def joined(self, blocks: Sequence[Tensor]) -> Tensor:
        """Return the whole weight. ``blocks`` are those of all ranks, in rank order."""
        places = [
            tuple(self.layout.place(rank, axes) for _, axes in self._divided()) for rank in range(self.layout.size)
        ]
        parts = dict(zip(places, blocks, strict=True))
        for split, axes in reversed([*self._divided()]):
            rest = dict.fromkeys(place[:-1] for place in parts)
            length = range(self.layout.length(axes))
            parts = {place: split.joined([parts[*place, part] for part in length]) for place in rest}
        return parts[()]

    def whole_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of the whole weight, given that of a block."""
        return tuple(length * self.layout.length(axes) for length, axes in zip(shape, self.dims, strict=True))

    def own_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Return the shape of a block, given that of the whole weight."""
        return tuple(length // self.layout.length(axes) for length, axes in zip(shape, self.dims, strict=True))

    def check(self, shape: Sequence[int], size: int, place: str) -> None:
        """Raise InputError if a whole weight of this shape cannot be divided evenly. ``place`` names the weight."""
        for split, axes in self._divided():
            split.check(shape, self.layout.length(axes), place)

    def counts(self, rank: int) -> bool:
        """Return whether a rank is the first of those that hold its block."""
        used = {axis for axes in self.dims for axis in axes}
        places = self.layout.coordinates(rank)
        return not any(places[axis] for axis in self.layout.axes if axis not in used)

    def _divided(self) -> Iterator[tuple[WeightSplit, tuple[Axis, ...]]]:
        """Yield each divided dimension, as a split of its own, and the axes that divide it."""
        for dim, axes in enumerate(self.dims):
            if axes:
                yield WeightSplit(dim=dim, sections=() if dim else self.sections), axes


#: How the ranks of a tensor group divide a weight.
Split = WeightSplit | GridSplit


class Gathers(Protocol):
    """Gathers blocks over the ranks of a tensor group."""

    rank: int
    size: int

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order. Collective."""


class SplitWeights:
    """The weights of a model that the ranks of a tensor group divide, by their names in the user's model.

    Args:
        group: the tensor group of this process.
        splits: how each divided weight is split. All other weights are whole on each rank.

    Attributes:
        whole_outputs: returns whole outputs of the model, given those of this rank; None if they are whole.

    """

    def __init__(self, group: Gathers, splits: Mapping[str, Split]) -> None:
        self.group = group
        self._splits = dict(splits)
        self.whole_outputs: Callable[[Any], Any] | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._splits

    def __getitem__(self, name: str) -> Split:
        return self._splits[name]

    def own(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's block of a weight, or a weight that is not divided unchanged."""
        return self._splits[name].own(whole, self.group.rank, self.group.size) if name in self else whole

    def whole(self, name: str, own: Tensor) -> Tensor:
        """Return a whole weight from the blocks of all ranks. Collective over the group if the weight is divided."""
        return self._splits[name].joined(self.group.gathered(own)) if name in self else own

    def whole_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a whole weight, given that of this rank's block."""
        return self._splits[name].whole_shape(shape, self.group.size) if name in self else tuple(shape)
