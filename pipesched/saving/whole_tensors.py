"""Whole tensors: made from the blocks that the ranks of a tensor group hold, one at a time, while they are saved."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from pipesched.progress import advance
from pipesched.saving.tensor_files import file_order

__all__ = ["NO_WHOLE_TENSORS", "WholeTensor", "WholeTensors"]


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of which this process holds a block."""

    #: The shape of the part that this process saves: that of the whole tensor, or of some of its rows.
    shape: tuple[int, ...]
    #: Returns this part. Collective over the tensor group.
    make: Callable[[], Tensor]


class WholeTensors:
    """Makes the whole tensors of a part of a checkpoint. Each exists only while it is used.

    All ranks of a tensor group make them in the same order, which is the order in a file. Each rank makes all of them,
    also if it writes none, or if writing fails.

    Args:
        tensors: the tensors of the part, keyed as in the checkpoint. Some of them are blocks.
        made: how the whole tensors of these blocks are made.

    """

    def __init__(self, tensors: Mapping[str, Tensor], made: Mapping[str, WholeTensor]) -> None:
        self._made = {key: made[key] for key in file_order(tensors) if key in made}
        self._left = dict(self._made)

    def __bool__(self) -> bool:
        return bool(self._made)

    def __contains__(self, key: object) -> bool:
        return key in self._made

    def shape(self, key: str, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the tensor with a key. ``tensor`` is what this process holds of it."""
        return self._made[key].shape if key in self._made else tuple(tensor.shape)

    def get(self, key: str, tensor: Tensor) -> Tensor:
        """Return the tensor with a key. Collective over the tensor group if ``tensor`` is a block."""
        return self._left.pop(key).make() if key in self._made else tensor

    def finish(self) -> None:
        """Make the tensors that are left, because the other ranks of the tensor group make them, too."""
        while self._left:
            self._left.pop(next(iter(self._left))).make()
            advance()


NO_WHOLE_TENSORS = WholeTensors(MappingProxyType({}), MappingProxyType({}))
