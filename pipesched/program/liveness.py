"""Liveness: the memory that a rank holds while each of its actions runs, computed from the order of its actions."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Columns, Ints, Mask
from pipesched.program.actions import Action, Holding, Kind

__all__ = ["Held", "bytes_held", "pairs_held", "peak_in_flight", "peaks_of_stages", "rank_limits", "versions_held"]

_TAKERS = {held: tuple(kind for kind in Kind if kind.row.takes is held) for held in Holding}
_GIVERS = {held: tuple(kind for kind in Kind if held in kind.row.gives) for held in Holding}
_ENDS = _GIVERS[Holding.WEIGHT_GRAD]
_OF_A_PAIR = (Holding.INPUT, Holding.ACTIVATIONS, Holding.WEIGHT_GRAD)
#: The memory that an action takes and another one with the same number gives, whatever runs between them.
_OF_AN_ACTION = {*Holding} - {*_OF_A_PAIR, Holding.WEIGHTS}


class Held(NamedTuple):
    """The memory that a rank holds during and after each action, in bytes or in (stage, micro-batch) pairs."""

    during: Ints
    after: Ints

    @classmethod
    def of(cls, takes: Ints, gives: Ints) -> "Held":
        """Compute the held amounts from the amounts that each action takes at its start and frees at its end."""
        after = np.cumsum(takes - gives)
        return cls(after + gives, after)

    @property
    def peak(self) -> int:
        """The largest amount held at any time."""
        return int(self.during.max(initial=0))


class _Pairs(NamedTuple):
    """For each row, the properties of its (stage, micro-batch) pair."""

    #: An integer that identifies the pair.
    pair: Ints
    #: Whether the pair has an R.
    recomputed: Mask
    #: Whether the pair has a B or a W.
    ended: Mask

    @classmethod
    def of(cls, columns: Columns) -> "_Pairs":
        pair = columns.pair
        recomputed = np.zeros(int(pair.max(initial=0)) + 1, np.bool_)
        ended = recomputed.copy()
        recomputed[pair[columns.are(Kind.R)]] = True
        ended[pair[columns.are(*_ENDS)]] = True
        return cls(pair, recomputed[pair], ended[pair])


def pairs_held(columns: Columns) -> Held:
    """Count the (stage, micro-batch) pairs in flight during and after each action of one rank's order.

    A pair is in flight from its F, or from its R if it is recomputed, to the end of its B or W. A pair without a
    backward is in flight only while its F runs.
    """
    pairs = _Pairs.of(columns)
    starts = np.where(pairs.recomputed, columns.are(Kind.R), columns.are(Kind.F))
    gives = columns.are(*_ENDS) | (starts & ~pairs.ended)
    return Held.of(starts.astype(np.int64), gives.astype(np.int64))


def peak_in_flight(actions: Iterable[Action] | Columns) -> int:
    """Return the largest number of (stage, micro-batch) pairs in flight at once in one rank's order."""
    return pairs_held(actions if isinstance(actions, Columns) else Columns.of(actions)).peak


def peaks_of_stages(columns: Columns, num_stages: int) -> Ints:
    """Return each stage's peak number of micro-batches in flight; 0 for a stage that no micro-batch visits.

    ``columns`` contains the orders of all ranks.
    """
    by_stage = columns[np.argsort(columns.stage, kind="stable")]  # every stage ends with no micro-batch in flight
    peaks = np.zeros(num_stages, np.int64)
    np.maximum.at(peaks, by_stage.stage, pairs_held(by_stage).during)
    return peaks


def rank_limits(max_in_flight: object, num_ranks: int) -> list[int]:
    """Return a limit for each rank; a single number applies to every rank. Raises ScheduleError for non-integers."""
    limits = list(max_in_flight if isinstance(max_in_flight, Iterable) else [max_in_flight] * num_ranks)
    wrong = [limit for limit in limits if not isinstance(limit, Integral)]
    if wrong:
        raise ScheduleError(
            f"max_in_flight must be a whole number, or a list with one for each rank; got {wrong[0]!r}; pass whole "
            f"numbers"
        )
    return limits


def bytes_held(
    columns: Columns, sizes: Mapping[Holding, Sequence[int]], versions: tuple[tuple[int, ...], ...] = ()
) -> Held:
    """Return the number of bytes that a rank holds during each action of its order, and after the action has ended.

    Args:
        columns: the rank's order.
        sizes: for each kind of memory, the bytes that one micro-batch, weight version or gather needs on each stage.
        versions: the weight version of each micro-batch, indexed by stage, as in `Program`.

    """
    pairs = _Pairs.of(columns)
    takes = np.zeros(len(columns), np.int64)
    gives = np.zeros(len(columns), np.int64)
    forward = columns.are(Kind.F)
    for holding in filter(lambda own: any(sizes[own]), _OF_A_PAIR):
        size = np.asarray(sizes[holding], np.int64)[columns.stage]
        taking = columns.are(*_TAKERS[holding])
        if holding is Holding.INPUT:
            taking = taking | (forward & pairs.recomputed)
        elif holding is Holding.ACTIVATIONS:
            taking = taking & ~(forward & pairs.recomputed)
        giving = _firsts(pairs.pair, columns.are(*_GIVERS[holding]) & _any_of(pairs.pair, taking))
        takes += np.where(taking, size, 0)
        gives += np.where(giving | (taking & ~pairs.ended), size, 0)
    for holding in filter(lambda own: any(sizes[own]), _OF_AN_ACTION & sizes.keys()):
        size = np.asarray(sizes[holding], np.int64)[columns.stage]
        taking = columns.are(*_TAKERS[holding])
        giving = columns.are(*_GIVERS[holding]) & _any_of(pairs.pair, taking)
        takes += np.where(taking, size, 0)
        gives += np.where(giving, size, 0)
    if columns.are(Kind.UPDATE).any():
        size = np.asarray(sizes[Holding.WEIGHTS], np.int64)
        for stage, begin, end in _stashes(columns, versions):
            takes[begin] += size[stage]
            gives[end] += size[stage]
    return Held.of(takes, gives)


def versions_held(columns: Columns, versions: tuple[tuple[int, ...], ...] = ()) -> dict[int, int]:
    """Return, for each stage of a rank, the largest number of weight versions held at once, including the newest."""
    held: dict[int, list[tuple[int, int]]] = {stage: [] for stage in np.unique(columns.stage).tolist()}
    for stage, begin, end in _stashes(columns, versions):
        held[stage].append((begin, end))
    return {stage: 1 + _most_at_once(intervals) for stage, intervals in held.items()}


def _most_at_once(intervals: list[tuple[int, int]]) -> int:
    """Return the largest number of intervals that contain the same row. An interval includes both its ends."""
    begins, ends = np.sort(np.array(intervals, np.int64).reshape(-1, 2), axis=0).T
    begun = np.arange(1, len(begins) + 1)
    return int((begun - np.searchsorted(ends, begins)).max(initial=0))


def _stashes(columns: Columns, versions: tuple[tuple[int, ...], ...]) -> list[tuple[int, int, int]]:
    """Return the old weight versions that a rank must keep.

    Each version is (stage, row of the update that replaces the version, row of the last action that uses it).
    """
    stashes: list[tuple[int, int, int]] = []
    updates = np.flatnonzero(columns.are(Kind.UPDATE))
    uses = np.flatnonzero(columns.are(Kind.F, *_ENDS))
    last = np.full(int(columns.stage.max(initial=0)) + 1, -1)
    last[columns.stage[uses]] = uses  # if a stage has several rows, numpy keeps the last one
    stages = columns.stage[updates]
    for stage in np.unique(stages[updates < last[stages]]).tolist():
        of_stage = columns.stage == stage
        updates = np.flatnonzero(of_stage & columns.are(Kind.UPDATE))
        forwards = np.flatnonzero(of_stage & columns.are(Kind.F))
        newest = np.searchsorted(updates, forwards)
        table = np.asarray(versions[stage] if versions and versions[stage] else (), np.int64)
        used = table[columns.microbatch[forwards]] if len(table) else newest
        last_use = np.full(len(updates) + 1, -1)
        ends = np.flatnonzero(of_stage & columns.are(*_ENDS))
        end_of = dict(zip(columns.microbatch[ends].tolist(), ends.tolist(), strict=True))
        for version, forward in zip(used.tolist(), forwards.tolist(), strict=True):
            if version < len(last_use):
                last_use[version] = max(last_use[version], end_of.get(int(columns.microbatch[forward]), forward))
        stashes += [
            (stage, update, int(last))
            for update, last in zip(updates.tolist(), last_use[:-1].tolist(), strict=True)
            if last > update
        ]
    return stashes


def _any_of(pair: Ints, rows: Mask) -> Mask:
    """Return a mask of all rows whose (stage, micro-batch) pair has at least one row in ``rows``."""
    has = np.zeros(int(pair.max(initial=0)) + 1, np.bool_)
    has[pair[rows]] = True
    return has[pair]


def _firsts(pair: Ints, rows: Mask) -> Mask:
    """Return a mask of the first row in ``rows`` of each (stage, micro-batch) pair."""
    chosen = np.zeros(len(pair), np.bool_)
    candidates = np.flatnonzero(rows)
    chosen[candidates[np.unique(pair[candidates], return_index=True)[1]]] = True
    return chosen
