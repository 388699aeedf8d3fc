"""Weight split: which block of a weight each rank of a tensor group holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from pipesched.errors import InputError

__all__ = ["SplitWeights", "WeightSplit"]


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

    def _whole_sections(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self.sections or (shape[self.dim],)

    def _parts(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = tensor.split(list(sizes), self.dim)
        return parts


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

    """

    def __init__(self, group: Gathers, splits: Mapping[str, WeightSplit]) -> None:
        self.group = group
        self._splits = dict(splits)

    def __contains__(self, name: object) -> bool:
        return name in self._splits

    def __getitem__(self, name: str) -> WeightSplit:
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
