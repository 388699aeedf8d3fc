"""Beam search: writes the orders of all ranks action by action, and keeps the best partial orders of each length.

Every partial order is continued by every action that can be next. The new ones are sorted by a lower bound on their
makespan, and the best are kept (Lowerre 1976; for schedules, Ow and Morton 1988). Two kinds are left out: those whose
bound is not below the best known makespan, and those that another one with the same actions dominates. If no others
have been left out, the search has proved its result, as a branch and bound does.
"""

from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.evaluation import UNFIT, Sequences
from pipesched.program.search.list_orders import Progress, progress_of, reset
from pipesched.program.search.partial_orders import (
    Ends,
    append,
    choices,
    dominates,
    ends_of,
    least,
    load,
    size_of,
    store,
)
from pipesched.program.search.problem import KINDS, Problem, Tables

__all__ = ["BeamSearch"]

_NONE = -1
#: The numbers that describe a candidate: the partial order it continues, its new action, its bound, and the sum of its
#: ranks' bounds.
_PARENT, _CODE, _BOUND, _TOTAL = range(4)
_FIELDS = 4
_PRIME = 1_000_003


class _Beam(NamedTuple):
    """The preallocated buffers of a beam search.

    An I and a W count as two actions, and so does a B. A partial order that a B has made one action longer than the
    others waits for them.
    """

    #: The most partial orders of each length.
    width: int
    #: How many numbers describe a partial order.
    size: int
    #: The partial orders of two successive lengths.
    states: Whole
    #: For each length, for each partial order that was kept, the one it continues, and its last action, or _NONE.
    parents: Whole
    codes: Whole
    #: The actions that can be next.
    options: Whole
    #: The candidates, and a heap of their numbers, the best one first.
    candidates: Whole
    heap: Whole
    #: For each hash value of counts of actions, the last partial order that was kept, or _NONE.
    latest: Whole
    #: For each partial order, the previous one with the same hash value, or _NONE.
    previous: Whole


class BeamSearch:
    """Finds orders by beam search.

    Args:
        problem: the problem.
        width: the most partial orders of each length to keep.

    """

    def __init__(self, problem: Problem, width: int) -> None:
        self._tables = problem.tables
        self._ends = ends_of(problem)
        self._progress = progress_of(self._tables)
        size = size_of(self._progress)
        length = len(self._tables.rank_of_slot)
        options = KINDS * problem.num_stages
        self._beam = _Beam(
            width=width,
            size=size,
            states=whole([0] * (2 * width * size)),
            parents=whole([0] * (length * width)),
            codes=whole([0] * (length * width)),
            options=whole([0] * options),
            candidates=whole([0] * (width * options * _FIELDS)),
            heap=whole([0] * (width * options)),
            latest=whole([0] * (4 * width)),
            previous=whole([0] * width),
        )

    def run(self, orders: Sequences, most: int) -> tuple[int, int, bool]:
        """Write to ``orders`` the best orders found that are shorter than ``most``.

        Returns:
            An upper bound on their makespan, or UNFIT if there are none; the number of candidates; and whether no
            orders are shorter than the ones found, or than ``most`` if none were found.

        """
        makespan, ran, proved = _search(self._tables, self._ends, self._progress, self._beam, orders, most)
        return int(makespan), int(ran), bool(proved)


@compiled
def _search(
    tables: Tables, ends: Ends, progress: Progress, beam: _Beam, orders: Sequences, most: int
) -> tuple[int, int, bool]:
    reset(tables, progress)
    store(progress, beam.states, 0)
    kept = 1
    begin = 0
    ran = 0
    proved = True
    for length in range(len(tables.rank_of_slot)):
        count = 0
        for parent in range(kept):
            load(progress, beam.states, begin + parent * beam.size)
            count = _continue(tables, ends, progress, beam, begin, parent, length, count)
        ran += count
        kept = _keep(tables, ends, progress, beam, begin, length, count, most)
        begin = beam.width * beam.size - begin
        if kept < 0:
            kept = beam.width
            proved = False
        if kept == 0:
            return UNFIT, ran, proved
    load(progress, beam.states, begin)
    makespan, _ = least(tables, progress, ends)
    _trace(tables, beam, orders)
    return makespan, ran, proved


@compiled
def _continue(
    tables: Tables, ends: Ends, progress: Progress, beam: _Beam, begin: int, parent: int, length: int, count: int
) -> int:
    """Add all continuations of the loaded partial order to the ``count`` candidates, and return the new number."""
    reached = 0
    for stage in range(tables.num_stages):
        reached += progress.forwards[stage] + progress.gradients[stage] + progress.weights[stage]
    number = 1
    if reached > length:
        beam.options[0] = _NONE
    else:
        number = choices(tables, progress, beam.options)
    for option in range(number):
        code = beam.options[option]
        if option > 0:
            load(progress, beam.states, begin + parent * beam.size)
        if code != _NONE:
            append(tables, progress, code)
        bound, total = least(tables, progress, ends)
        at = count * _FIELDS
        beam.candidates[at + _PARENT] = parent
        beam.candidates[at + _CODE] = code
        beam.candidates[at + _BOUND] = bound
        beam.candidates[at + _TOTAL] = total
        count += 1
    return count


@compiled
def _keep(
    tables: Tables, ends: Ends, progress: Progress, beam: _Beam, begin: int, length: int, count: int, most: int
) -> int:
    """Keep the best candidates, and return their number; -1 if a candidate was left out for the width alone."""
    target = beam.width * beam.size - begin
    for at in range(len(beam.latest)):
        beam.latest[at] = _NONE
    for number in range(count):
        beam.heap[number] = number
    for at in range(count // 2 - 1, -1, -1):
        _sink(beam, at, count)
    kept = 0
    while count > 0:
        best = beam.heap[0] * _FIELDS
        if beam.candidates[best + _BOUND] >= most:
            return kept
        if kept == beam.width:
            return -1
        count -= 1
        beam.heap[0] = beam.heap[count]
        _sink(beam, 0, count)
        parent = beam.candidates[best + _PARENT]
        code = beam.candidates[best + _CODE]
        load(progress, beam.states, begin + parent * beam.size)
        if code != _NONE:
            append(tables, progress, code)
        store(progress, beam.states, target + kept * beam.size)
        if _is_new(tables, ends, beam, target, kept):
            beam.parents[length * beam.width + kept] = parent
            beam.codes[length * beam.width + kept] = code
            kept += 1
    return kept


@compiled
def _sink(beam: _Beam, at: int, size: int) -> None:
    """Move an entry of the heap down until no entry below it is better."""
    heap = beam.heap
    moved = heap[at] if size else 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _is_better(beam, heap[child + 1], heap[child]):
            child += 1
        if not _is_better(beam, heap[child], moved):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moved


@compiled
def _is_better(beam: _Beam, one: int, other: int) -> bool:
    """Return whether a candidate is better than another one: by its bound, then by the sum, then by its number."""
    for field in (_BOUND, _TOTAL):
        difference = beam.candidates[one * _FIELDS + field] - beam.candidates[other * _FIELDS + field]
        if difference != 0:
            return difference < 0
    return one < other


@compiled
def _is_new(tables: Tables, ends: Ends, beam: _Beam, begin: int, number: int) -> bool:
    """Return whether no earlier partial order dominates this one, and if so, add it to those to compare with."""
    at = begin + number * beam.size
    key = 0
    for count in range(at, at + 3 * tables.num_stages):
        key = (key * (tables.num_microbatches + 1) + beam.states[count]) % _PRIME
    key %= len(beam.latest)
    other = beam.latest[key]
    while other != _NONE:
        if dominates(tables, ends, beam.states, begin + other * beam.size, at):
            return False
        other = beam.previous[other]
    beam.previous[number] = beam.latest[key]
    beam.latest[key] = number
    return True


@compiled
def _trace(tables: Tables, beam: _Beam, orders: Sequences) -> None:
    """Write the orders of the best partial order of the full length."""
    slots = orders.slots
    for rank in range(tables.num_ranks):
        orders.lengths[rank] = 0
        orders.busy[rank] = 0
    number = 0
    for length in range(len(tables.rank_of_slot) - 1, -1, -1):
        code = beam.codes[length * beam.width + number]
        number = beam.parents[length * beam.width + number]
        if code != _NONE:
            rank = tables.rank_of[code // KINDS // tables.num_microbatches]
            orders.lengths[rank] += 1
            orders.busy[rank] += tables.seconds[code]
            slots[tables.first[rank + 1] - orders.lengths[rank]] = code
    for rank in range(tables.num_ranks):
        unused = tables.first[rank + 1] - tables.first[rank] - orders.lengths[rank]
        for slot in range(tables.first[rank], tables.first[rank] + orders.lengths[rank]):
            slots[slot] = slots[slot + unused]
