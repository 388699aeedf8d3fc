"""Beam search: writes the orders of all ranks action by action, and keeps the best partial orders of each length.

Every partial order is continued with every action that can come next. The continuations are sorted by a lower bound on
their makespan, and the best are kept (Lowerre 1976; for schedules, Ow and Morton 1988). A continuation is discarded if
its bound is not below the best known makespan, or if another continuation with the same actions dominates it. If no
continuation is discarded for any other reason, the result is proved to be optimal, as in branch and bound.
"""

from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.evaluation import Sequences
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

    A B counts as two actions, like an I and a W. A partial order that has become one action longer than the others
    because of a B is not continued until the others have the same length.
    """

    #: The maximum number of partial orders of each length.
    width: int
    #: The number of integers that describe a partial order.
    size: int
    #: The partial orders of two successive lengths.
    states: Whole
    #: For each length, the number of partial orders that were kept.
    kept: Whole
    #: For each length and each partial order that was kept, the partial order that it continues.
    parents: Whole
    #: For each length and each partial order that was kept, its last action, or _NONE.
    codes: Whole
    #: The actions that can come next.
    options: Whole
    #: The candidates.
    candidates: Whole
    #: A heap of the candidates' numbers. The best candidate is at the top.
    heap: Whole
    #: For each hash value of counts of actions, the last partial order that was kept, or _NONE.
    latest: Whole
    #: For each partial order, the previous partial order with the same hash value, or _NONE.
    previous: Whole


class BeamSearch:
    """Finds orders by beam search.

    Args:
        problem: the problem.
        width: the maximum number of partial orders of each length to keep.

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
            kept=whole([0] * (length + 1)),
            parents=whole([0] * (length * width)),
            codes=whole([0] * (length * width)),
            options=whole([0] * options),
            candidates=whole([0] * (width * options * _FIELDS)),
            heap=whole([0] * (width * options)),
            latest=whole([0] * (4 * width)),
            previous=whole([0] * width),
        )

    def run(self, orders: Sequences, most: int) -> tuple[bool, int, bool]:
        """Find the best orders with a makespan below ``most``, and write them to ``orders``.

        Returns:
            Whether any orders were found, the number of candidates, and whether the search proves that none are better.

        """
        found, ran, proved = _search(self._tables, self._ends, self._progress, self._beam, orders, most)
        return bool(found), int(ran), bool(proved)


@compiled
def _search(
    tables: Tables, ends: Ends, progress: Progress, beam: _Beam, orders: Sequences, most: int
) -> tuple[bool, int, bool]:
    reset(tables, progress)
    store(progress, beam.states, _place(beam, 0, 0))
    beam.kept[0] = 1
    ran = 0
    proved = True
    for length in range(len(tables.rank_of_slot)):
        count = _continue(tables, ends, progress, beam, length)
        ran += count
        if _keep(tables, ends, progress, beam, length, count, most):
            proved = False
        if beam.kept[length + 1] == 0:
            return False, ran, proved
    _trace(tables, beam, orders)
    return True, ran, proved


@compiled
def _place(beam: _Beam, length: int, number: int) -> int:
    """Return the position in ``beam.states`` of the partial order ``number`` among those with ``length`` actions."""
    return (length % 2 * beam.width + number) * beam.size


@compiled
def _continue(tables: Tables, ends: Ends, progress: Progress, beam: _Beam, length: int) -> int:
    """Write all continuations of the kept partial orders to ``beam.candidates``, and return their number."""
    count = 0
    for parent in range(beam.kept[length]):
        load(progress, beam.states, _place(beam, length, parent))
        reached = 0
        for stage in range(tables.num_stages):
            reached += progress.forwards[stage] + progress.gradients[stage] + progress.weights[stage]
        options = 1
        beam.options[0] = _NONE
        if reached == length:
            options = choices(tables, progress, beam.options)
        for option in range(options):
            at = count * _FIELDS
            beam.candidates[at + _PARENT] = parent
            beam.candidates[at + _CODE] = beam.options[option]
            _extend(tables, progress, beam, length, at)
            bound, total = least(tables, progress, ends)
            beam.candidates[at + _BOUND] = bound
            beam.candidates[at + _TOTAL] = total
            count += 1
    return count


@compiled
def _extend(tables: Tables, progress: Progress, beam: _Beam, length: int, at: int) -> None:
    """Set ``progress`` to the partial order of a candidate."""
    load(progress, beam.states, _place(beam, length, beam.candidates[at + _PARENT]))
    if beam.candidates[at + _CODE] != _NONE:
        append(tables, progress, beam.candidates[at + _CODE])


@compiled
def _keep(tables: Tables, ends: Ends, progress: Progress, beam: _Beam, length: int, count: int, most: int) -> bool:
    """Keep the best candidates. Return whether any were discarded because ``beam.width`` was reached."""
    for at in range(len(beam.latest)):
        beam.latest[at] = _NONE
    for number in range(count):
        beam.heap[number] = number
    for later in range(count):
        _sink(beam, count - 1 - later, count)
    kept = 0
    for left in range(count, 0, -1):
        at = beam.heap[0] * _FIELDS
        if beam.candidates[at + _BOUND] >= most:
            break
        if kept == beam.width:
            beam.kept[length + 1] = kept
            return True
        beam.heap[0] = beam.heap[left - 1]
        _sink(beam, 0, left - 1)
        _extend(tables, progress, beam, length, at)
        place = _place(beam, length + 1, kept)
        store(progress, beam.states, place)
        if _is_new(tables, ends, beam, place):
            beam.parents[length * beam.width + kept] = beam.candidates[at + _PARENT]
            beam.codes[length * beam.width + kept] = beam.candidates[at + _CODE]
            kept += 1
    beam.kept[length + 1] = kept
    return False


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
    """Return whether one candidate has a smaller bound than another; on ties, a smaller total, then a lower index."""
    for field in (_BOUND, _TOTAL):
        difference = beam.candidates[one * _FIELDS + field] - beam.candidates[other * _FIELDS + field]
        if difference != 0:
            return difference < 0
    return one < other


@compiled
def _is_new(tables: Tables, ends: Ends, beam: _Beam, place: int) -> bool:
    """Add a partial order to the hash table unless an entry of the table dominates it. Return whether it was added."""
    key = 0
    for at in range(place, place + 3 * tables.num_stages):
        key = (key * (tables.num_microbatches + 1) + beam.states[at]) % _PRIME
    key %= len(beam.latest)
    number = place // beam.size % beam.width
    first = place - number * beam.size
    other = beam.latest[key]
    while other != _NONE:
        if dominates(tables, ends, beam.states, first + other * beam.size, place):
            return False
        other = beam.previous[other]
    beam.previous[number] = beam.latest[key]
    beam.latest[key] = number
    return True


@compiled
def _trace(tables: Tables, beam: _Beam, orders: Sequences) -> None:
    """Write the best complete orders to ``orders``."""
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
