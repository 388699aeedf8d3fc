"""Beam search: writes the orders of all ranks action by action, and keeps the best partial orders of each length.

Every partial order is continued with every action that can come next. The continuations are sorted by a lower bound on
their makespan, and the best are kept (Lowerre 1976; for schedules, Ow and Morton 1988). A continuation is discarded if
its bound is not below the best known makespan, or if another continuation with the same actions dominates it. If no
continuation is discarded for any other reason, the result is proved to be optimal, as in branch and bound.
"""

from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.evaluation import Sequences
from pipesched.program.search.list_orders import OrderProgress, progress_of, reset
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
from pipesched.program.search.problem import KINDS, OrderProblem, Tables

__all__ = ["BeamSearch"]

_NONE = -1
_PRIME = 1_000_003


class BeamResult(NamedTuple):
    """The result of a beam search."""

    #: Whether any orders were found.
    found: bool
    #: The number of candidates.
    num_candidates: int
    #: Whether the search proves that no orders are better.
    proved: bool


class _Candidates(NamedTuple):
    """The continuations of the partial orders of one length. Each array has one entry for each candidate."""

    #: The number of the partial order that the candidate continues.
    parent: Whole
    #: The action that the candidate adds, or _NONE.
    code: Whole
    #: A lower bound on the makespan.
    bound: Whole
    #: The sum of the lower bounds of all ranks.
    total: Whole


class _KeptOrders(NamedTuple):
    """The partial orders that were kept, of all lengths. `_entry` is the position of one in ``parent`` and ``code``."""

    #: For each length, the number of partial orders.
    counts: Whole
    #: The number of the partial order, one action shorter, that this one continues.
    parent: Whole
    #: The last action, or _NONE.
    code: Whole


class _HashTable(NamedTuple):
    """The kept partial orders of one length, by the hash values of their counts of actions."""

    #: For each hash value, the last partial order with this value, or _NONE.
    latest: Whole
    #: For each partial order, the previous partial order with the same hash value, or _NONE.
    previous: Whole


class _Beam(NamedTuple):
    """The preallocated buffers of a beam search.

    A B counts as two actions, like an I and a W. A partial order that has become one action longer than the others
    because of a B is not continued until the others have the same length.
    """

    #: The maximum number of partial orders of each length.
    width: int
    #: The number of integers that describe a partial order.
    size: int
    #: The partial orders of two successive lengths. `_place` is the position of one.
    states: Whole
    kept: _KeptOrders
    #: The actions that can come next.
    options: Whole
    candidates: _Candidates
    #: A heap of the candidates' numbers. The best candidate is at the top.
    heap: Whole
    table: _HashTable


def _beam(tables: Tables, width: int, size: int) -> _Beam:
    """Allocate the buffers of a beam search."""
    length = len(tables.rank_of_slot)
    options = KINDS * tables.num_stages

    def blank(count: int) -> Whole:
        return whole([0] * count)

    return _Beam(
        width=width,
        size=size,
        states=blank(2 * width * size),
        kept=_KeptOrders(counts=blank(length + 1), parent=blank(length * width), code=blank(length * width)),
        options=blank(options),
        candidates=_Candidates(*(blank(width * options) for _ in _Candidates._fields)),
        heap=blank(width * options),
        table=_HashTable(latest=blank(4 * width), previous=blank(width)),
    )


class BeamSearch:
    """Finds orders by beam search.

    Args:
        problem: the problem.
        width: the maximum number of partial orders of each length to keep.

    """

    def __init__(self, problem: OrderProblem, width: int) -> None:
        self._tables = problem.tables
        self._ends = ends_of(problem)
        self._progress = progress_of(self._tables)
        self._beam = _beam(self._tables, width, size_of(self._progress))

    def run(self, orders: Sequences, most: int) -> BeamResult:
        """Find the best orders with a makespan below ``most``, and write them to ``orders``."""
        found, num_candidates, proved = _search(self._tables, self._ends, self._progress, self._beam, orders, most)
        return BeamResult(found=bool(found), num_candidates=int(num_candidates), proved=bool(proved))


@compiled
def _search(
    tables: Tables, ends: Ends, progress: OrderProgress, beam: _Beam, orders: Sequences, most: int
) -> tuple[bool, int, bool]:
    """Write the best orders to ``orders``, and return the fields of a `BeamResult`."""
    reset(tables, progress)
    store(progress, beam.states, _place(beam, 0, 0))
    beam.kept.counts[0] = 1
    num_candidates = 0
    proved = True
    for length in range(len(tables.rank_of_slot)):
        count = _add_candidates(tables, ends, progress, beam, length)
        num_candidates += count
        if _keep_best(tables, ends, progress, beam, length, count, most):
            proved = False
        if beam.kept.counts[length + 1] == 0:
            return False, num_candidates, proved
    _write_best(tables, beam.kept, beam.width, orders)
    return True, num_candidates, proved


@compiled
def _place(beam: _Beam, length: int, number: int) -> int:
    """Return the position in ``beam.states`` of the partial order ``number`` among those with ``length`` actions."""
    return (length % 2 * beam.width + number) * beam.size


@compiled
def _entry(width: int, length: int, number: int) -> int:
    """Return the position in `_KeptOrders` of the partial order ``number`` among those with ``length`` actions."""
    return (length - 1) * width + number


@compiled
def _add_candidates(tables: Tables, ends: Ends, progress: OrderProgress, beam: _Beam, length: int) -> int:
    """Write all continuations of the partial orders of this length to ``beam.candidates``. Return their number."""
    candidates = beam.candidates
    count = 0
    for parent in range(beam.kept.counts[length]):
        load(progress, beam.states, _place(beam, length, parent))
        reached = 0
        for stage in range(tables.num_stages):
            reached += progress.forwards[stage] + progress.gradients[stage] + progress.weights[stage]
        options = 1
        beam.options[0] = _NONE
        if reached == length:
            options = choices(tables, progress, beam.options)
        for option in range(options):
            candidates.parent[count] = parent
            candidates.code[count] = beam.options[option]
            _extend(tables, progress, beam, length, count)
            bound, total = least(tables, progress, ends)
            candidates.bound[count] = bound
            candidates.total[count] = total
            count += 1
    return count


@compiled
def _extend(tables: Tables, progress: OrderProgress, beam: _Beam, length: int, candidate: int) -> None:
    """Set ``progress`` to the partial order of a candidate."""
    load(progress, beam.states, _place(beam, length, beam.candidates.parent[candidate]))
    code = beam.candidates.code[candidate]
    if code != _NONE:
        append(tables, progress, code)


@compiled
def _keep_best(
    tables: Tables, ends: Ends, progress: OrderProgress, beam: _Beam, length: int, count: int, most: int
) -> bool:
    """Keep the best of ``count`` candidates. Return whether any were discarded because the beam is full."""
    candidates = beam.candidates
    kept = beam.kept
    for key in range(len(beam.table.latest)):
        beam.table.latest[key] = _NONE
    for number in range(count):
        beam.heap[number] = number
    for at in range(count - 1, -1, -1):
        _sink(beam.heap, candidates, at, count)
    kept.counts[length + 1] = 0
    for left in range(count, 0, -1):
        best = beam.heap[0]
        if candidates.bound[best] >= most:
            break
        number = kept.counts[length + 1]
        if number == beam.width:
            return True
        beam.heap[0] = beam.heap[left - 1]
        _sink(beam.heap, candidates, 0, left - 1)
        _extend(tables, progress, beam, length, best)
        store(progress, beam.states, _place(beam, length + 1, number))
        if _add_to_table(tables, ends, beam, length + 1, number):
            entry = _entry(beam.width, length + 1, number)
            kept.parent[entry] = candidates.parent[best]
            kept.code[entry] = candidates.code[best]
            kept.counts[length + 1] += 1
    return False


@compiled
def _sink(heap: Whole, candidates: _Candidates, at: int, size: int) -> None:
    """Move an entry of the heap down until no entry below it is better."""
    moved = heap[at] if size else 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _is_better(candidates, heap[child + 1], heap[child]):
            child += 1
        if not _is_better(candidates, heap[child], moved):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moved


@compiled
def _is_better(candidates: _Candidates, one: int, other: int) -> bool:
    """Return whether one candidate has a smaller bound than another; on ties, a smaller total, then a lower number."""
    if candidates.bound[one] != candidates.bound[other]:
        return candidates.bound[one] < candidates.bound[other]
    if candidates.total[one] != candidates.total[other]:
        return candidates.total[one] < candidates.total[other]
    return one < other


@compiled
def _add_to_table(tables: Tables, ends: Ends, beam: _Beam, length: int, number: int) -> bool:
    """Add a partial order to the hash table unless an entry of the table dominates it. Return whether it was added."""
    place = _place(beam, length, number)
    key = _key(tables, beam.states, place) % len(beam.table.latest)
    other = beam.table.latest[key]
    while other != _NONE:
        if dominates(tables, ends, beam.states, _place(beam, length, other), place):
            return False
        other = beam.table.previous[other]
    beam.table.previous[number] = beam.table.latest[key]
    beam.table.latest[key] = number
    return True


@compiled
def _key(tables: Tables, states: Whole, place: int) -> int:
    """Return a hash value of a partial order's counts of actions, with which its description begins."""
    key = 0
    for at in range(place, place + 3 * tables.num_stages):
        key = (key * (tables.num_microbatches + 1) + states[at]) % _PRIME
    return key


@compiled
def _write_best(tables: Tables, kept: _KeptOrders, width: int, orders: Sequences) -> None:
    """Write the best complete orders to ``orders``, from the last action to the first."""
    slots = orders.slots
    for rank in range(tables.num_ranks):
        orders.lengths[rank] = 0
        orders.busy[rank] = 0
    number = 0
    for length in range(len(tables.rank_of_slot), 0, -1):
        entry = _entry(width, length, number)
        code = kept.code[entry]
        number = kept.parent[entry]
        if code != _NONE:
            rank = tables.rank_of[code // KINDS // tables.num_microbatches]
            orders.lengths[rank] += 1
            orders.busy[rank] += tables.seconds[code]
            slots[tables.first[rank + 1] - orders.lengths[rank]] = code
    for rank in range(tables.num_ranks):  # a rank's actions stand at the end of its slots now
        unused = tables.first[rank + 1] - tables.first[rank] - orders.lengths[rank]
        for slot in range(tables.first[rank], tables.first[rank] + orders.lengths[rank]):
            slots[slot] = slots[slot + unused]
