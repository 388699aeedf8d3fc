"""Chunks: the pieces of a tensor, saved by different processes. A chunk consists of whole rows of the tensor.

The fields of a chunk have the same names and meanings as in torch.distributed.checkpoint.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from pipesched.json_files import read_fields

__all__ = ["Chunk", "Rows", "covers_tensor", "pieces"]


class Rows(NamedTuple):
    """A range of rows, that is, of indexes into a tensor's first dimension."""

    start: int
    #: The index after the last row.
    end: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A piece of a tensor, stored in one file."""

    #: The name of the file in the data folder.
    file: str
    #: The index of the chunk's first element in the tensor.
    offsets: tuple[int, ...]
    #: The shape of the chunk.
    sizes: tuple[int, ...]

    @classmethod
    def from_dict(cls, values: Any) -> "Chunk":
        """Make a chunk from a dict of its fields, which may have been read from JSON. Raises ScheduleError."""
        return read_fields(cls, values, "a chunk must have")

    @property
    def rows(self) -> Rows:
        """The range of the tensor's rows that are in this chunk."""
        return Rows(self.offsets[0], self.offsets[0] + self.sizes[0])


def covers_tensor(chunks: Sequence[Chunk], shape: Sequence[int]) -> bool:
    """Return whether chunks, sorted by rows, together hold every element of a tensor exactly once."""
    end = 0
    for chunk in chunks:
        if chunk.offsets != (end, *[0] * (len(shape) - 1)) or chunk.sizes[1:] != tuple(shape[1:]):
            return False
        end = chunk.rows.end
    return end == shape[0] and sum(prod(chunk.sizes) for chunk in chunks) == prod(shape)


def pieces(chunks: Sequence[Chunk], rows: Rows | None) -> Iterator[tuple[Chunk, Rows | None]]:
    """Yield each chunk that holds any of a tensor's rows in the range ``rows``, and the rows to read from this chunk.

    The rows to read are counted from the chunk's first row. None means all rows: if ``rows`` is None, every chunk is
    yielded with None.
    """
    for chunk in chunks:
        if rows is None:
            yield chunk, None
            continue
        start, end = chunk.rows
        own = Rows(max(start, rows.start) - start, min(end, rows.end) - start)
        if own.start < own.end:
            yield chunk, own
