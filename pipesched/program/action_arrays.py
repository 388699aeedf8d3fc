"""Action arrays: many actions as arrays of integers, one row per action.

A program for a thousand ranks has millions of actions. Code that processes all actions works on these arrays. Code
that needs only a few actions reads them as `Action` objects.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from pipesched.errors import ScheduleError
from pipesched.program.actions import Action, Kind, Lane
from pipesched.units import counted

__all__ = ["CODES", "MOST_SLOTS", "NUM_KINDS", "Columns", "Ints", "Mask", "Orders"]

Ints = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]

_KINDS = tuple(Kind)
NUM_KINDS = len(_KINDS)
#: The integer code of each kind of action, as used in `Columns.kind`.
CODES: dict[Kind, int] = {kind: code for code, kind in enumerate(_KINDS)}
#: The maximum number of slots per action in a lookup table over stages and micro-batches. A larger table might not fit
#: in memory.
MOST_SLOTS = 64
_COMPUTES = np.array([kind.row.lane is Lane.COMPUTE for kind in _KINDS])


@dataclass(frozen=True, eq=False, slots=True)
class Columns:
    """A sequence of actions as arrays, one row per action."""

    stage: Ints
    #: The code of each action's kind (see `CODES`).
    kind: Ints
    microbatch: Ints
    #: For a transfer, the stage at the other end; -1 for all other actions.
    peer: Ints
    #: Whether the action overlaps with the action in the next row. Overlapping actions start and end together.
    joined: Mask

    @classmethod
    def of(cls, actions: Iterable[Action]) -> "Columns":
        """Convert actions to columns. Raises ScheduleError for invalid values and numbers that exceed 32 bits."""
        try:
            rows: list[tuple[Any, ...]] = [
                (stage, CODES[kind], microbatch, -1 if peer is None else peer)
                for stage, kind, microbatch, peer in actions
            ]
            table = np.array(rows or np.zeros((0, 4), np.int64))  # without dtype=, which would truncate fractions
        except ScheduleError:
            raise
        except (KeyError, OverflowError, ValueError, TypeError) as error:
            raise ScheduleError(
                f"an order may contain only actions, Action(stage, kind, microbatch, peer=None); reading the order "
                f"raised {error!r}; correct the order"
            ) from None
        if table.dtype.kind != "i" or (table >= 2**31).any() or (table < -(2**31)).any():
            wrong = next(row for row in rows if not all(map(_fits, row)))
            raise ScheduleError(
                f"stages and micro-batches must be whole numbers below 2**31; got {wrong}; correct them"
            )
        return cls.numbered(table[:, 0], table[:, 1], table[:, 2], table[:, 3])

    @classmethod
    def numbered(cls, stage: Ints, kind: Ints, microbatch: Ints, peer: Ints | int = -1) -> "Columns":
        """Build columns of actions that do not overlap. ``kind`` contains the code of each action's kind."""
        peers = np.full(len(stage), peer, np.int32) if isinstance(peer, int) else peer.astype(np.int32)
        return cls(
            stage.astype(np.int32),
            kind.astype(np.int8),
            microbatch.astype(np.int32),
            peers,
            np.zeros(len(stage), np.bool_),
        )

    def __len__(self) -> int:
        return len(self.stage)

    def __getitem__(self, rows: Any) -> "Columns":
        """Select rows by a slice, a mask or an array of positions."""
        return Columns(*(column[rows] for column in self._all()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and all(
            np.array_equal(mine, theirs) for mine, theirs in zip(self._all(), other._all(), strict=True)
        )

    def __hash__(self) -> int:
        return hash((len(self), self.stage.tobytes(), self.kind.tobytes(), self.microbatch.tobytes()))

    def __iter__(self) -> Iterator[Action]:
        lists = (column.tolist() for column in (self.stage, self.kind, self.microbatch, self.peer))
        for stage, kind, microbatch, peer in zip(*lists, strict=True):
            yield Action(stage, _KINDS[kind], microbatch, None if peer < 0 else peer)

    def _all(self) -> tuple[Ints | Mask, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def action(self, row: int) -> Action:
        """Return the action in a row."""
        return next(iter(self[row : row + 1]))

    def are(self, *kinds: Kind) -> Mask:
        """Return a mask of the rows whose action has one of these kinds."""
        chosen = np.zeros(NUM_KINDS, np.bool_)
        chosen[[CODES[kind] for kind in kinds]] = True
        return chosen[self.kind]

    @property
    def compute(self) -> Mask:
        """A mask of the rows with a compute action, as opposed to a copy, a message or a collective."""
        return _COMPUTES[self.kind]

    @property
    def overlapping(self) -> Mask:
        """A mask of the rows whose action overlaps with the action in the previous row."""
        second = np.zeros(len(self), np.bool_)
        second[1:] = self.joined[:-1]
        return second

    @property
    def pair(self) -> Ints:
        """For each row, an integer that identifies its (stage, micro-batch) pair."""
        width = int(self.microbatch.max(initial=0)) + 1
        pair: Ints = self.stage.astype(np.int64) * width + self.microbatch
        if pair.max(initial=0) <= MOST_SLOTS * (len(pair) + 1024):
            return pair
        return np.unique(pair, return_inverse=True)[1].reshape(-1)  # consecutive integers keep tables small

    @staticmethod
    def joined_up(parts: Sequence["Columns"]) -> "Columns":
        """Concatenate the rows of all parts, in the given order."""
        if not parts:
            return Columns.of(())
        return Columns(*(np.concatenate(columns) for columns in zip(*(part._all() for part in parts), strict=True)))


class Orders(Sequence[tuple[Action, ...]]):
    """The orders of all ranks: a sequence with one tuple of actions per rank, stored as columns, rank after rank.

    The actions of rank r are in the rows ``offsets[r]`` to ``offsets[r + 1] - 1``. An `Orders` object is equal to a
    tuple or list that contains the same tuples of actions.
    """

    __slots__ = ("_shown", "columns", "offsets")

    def __init__(self, columns: Columns, offsets: Ints) -> None:
        self.columns = columns
        self.offsets = offsets
        self._shown: dict[int, tuple[Action, ...]] = {}

    @classmethod
    def of(cls, orders: Iterable[Iterable[Action]]) -> "Orders":
        """Build the orders of all ranks from the actions of each rank."""
        if isinstance(orders, Orders):
            return orders
        shown = [tuple(order) for order in orders]
        made = cls(Columns.of(chain.from_iterable(shown)), _offsets(map(len, shown)))
        made._shown = dict(enumerate(shown))
        return made

    @classmethod
    def of_ranks(cls, ranks: Sequence[Columns]) -> "Orders":
        """Build the orders of all ranks from the columns of each rank."""
        return cls(Columns.joined_up(ranks), _offsets(map(len, ranks)))

    def parts(self) -> tuple[Ints | Mask, ...]:
        """Return all arrays of this object: the offsets, then the columns."""
        return self.offsets, *self.columns._all()

    @classmethod
    def of_parts(cls, offsets: Ints, *columns: Any) -> "Orders":
        """Build the orders from the arrays that `parts` returns."""
        return cls(Columns(*columns), offsets)

    def rank(self, rank: int) -> Columns:
        """Return one rank's order as columns."""
        return self.columns[int(self.offsets[rank]) : int(self.offsets[rank + 1])]

    @property
    def rank_of(self) -> Ints:
        """The rank that each row belongs to."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def place(self, row: int) -> tuple[int, int]:
        """Return the rank of a row, and the position of the row in that rank's order."""
        rank = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return rank, row - int(self.offsets[rank])

    def where(self, rows: Mask) -> "Orders":
        """Return only the rows that a mask selects.

        If the mask drops one of two overlapping actions, the remaining action no longer overlaps.
        """
        kept = np.concatenate([[0], np.cumsum(rows)])
        columns = self.columns[rows]
        columns.joined[:] &= np.concatenate([rows[1:], [False]])[rows]
        return Orders(columns, kept[self.offsets])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[Action, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Action, ...]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return tuple(self[rank] for rank in range(*index.indices(len(self))))
        rank = range(len(self))[index]
        if rank not in self._shown:
            self._shown[rank] = tuple(self.rank(rank))
        return self._shown[rank]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Orders):
            return np.array_equal(self.offsets, other.offsets) and self.columns == other.columns
        return isinstance(other, tuple | list) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash((self.offsets.tobytes(), self.columns))

    def __repr__(self) -> str:
        return f"Orders({counted(len(self), 'rank')}, {counted(len(self.columns), 'action')})"


def _fits(number: Any) -> bool:
    return isinstance(number, int | np.integer) and abs(int(number)) < 2**31


def _offsets(lengths: Iterable[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(list(lengths), dtype=np.int64)]).astype(np.int64)
