"""Dependencies: defines which actions must have ended before an action starts.

The row of a kind (`KindRow.needs`) is the single definition of these rules. ``needs`` applies the rules to one action,
for error messages; ``requirements`` applies them to all actions at once. The validator, the lowering passes, the
simulator and the executors use these rules.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count, takewhile
from typing import NamedTuple

import numpy as np

from pipesched.checks import shown
from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import CODES, MOST_SLOTS, NUM_KINDS, Columns, Ints, Mask
from pipesched.program.actions import NUMBERED, OTHER_END, Action, At, Kind, Need
from pipesched.units import counted

__all__ = ["BACKWARDS", "INPUT_USES", "WEIGHT_USES", "Index", "StageGraph", "chain", "needs", "requirements"]

#: The kinds that yield the gradient of a stage's input.
BACKWARDS = (Kind.B, Kind.I)
#: The kinds that use the full (unsharded) weights of their stage. W is included for three reasons: the W of a
#: convolution reads the weights, every W accumulates full gradients, and hooks during a W see the full Parameter.
WEIGHT_USES = tuple(kind for kind in Kind if any(need.at is At.GATHER for need in kind.row.needs))

_GIVERS = {At.PRODUCERS, At.CONSUMERS, At.PEER}
#: The kinds that use an output or a gradient of another stage: compute actions, and receives.
INPUT_USES = tuple(kind for kind in Kind if any(need.at in _GIVERS for need in kind.row.needs))


@dataclass(frozen=True)
class StageGraph:
    """For each stage, the stages that produce its inputs and the stages that consume its output, in ascending order."""

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, num_stages: int, edges: Iterable[tuple[int, int]]) -> "StageGraph":
        """Build the graph from its (producer, consumer) edges."""
        producers: list[list[int]] = [[] for _ in range(num_stages)]
        consumers: list[list[int]] = [[] for _ in range(num_stages)]
        for a, b in sorted(set(edges)):
            producers[b].append(a)
            consumers[a].append(b)
        return cls(tuple(map(tuple, producers)), tuple(map(tuple, consumers)))

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """All (producer, consumer) pairs, in ascending order."""
        return tuple((a, b) for a, ends in enumerate(self.consumers) for b in ends)

    @cached_property
    def edge_codes(self) -> Ints:
        """For each edge, the integer ``producer * num_stages + consumer``, in ascending order."""
        return np.array([a * len(self.consumers) + b for a, b in self.edges], np.int64)

    def ends(self, table: tuple[tuple[int, ...], ...]) -> list[Ints]:
        """Convert ``producers`` or ``consumers`` to arrays indexed by stage.

        The n-th array contains the n-th producer or consumer of each stage; -1 if the stage has fewer.
        """
        most = max(map(len, table), default=0)
        return [np.array([row[nth] if nth < len(row) else -1 for row in table], np.int64) for nth in range(most)]


@cache
def chain(num_stages: int, num_chains: int = 1) -> StageGraph:
    """Return the default graph, in which every stage feeds the next.

    With several chains, all chains have the same length, and no edge connects two chains.
    """
    length = num_stages // num_chains
    return StageGraph.of(num_stages, [(s, s + 1) for s in range(num_stages - 1) if (s + 1) % length])


def needs(action: Action, graph: StageGraph, present: Container[Action]) -> Iterator[Action]:
    """Yield the actions that must have ended before ``action`` starts.

    A dependency may have alternatives, such as I and B. The first alternative in ``present`` (the program's actions) is
    yielded; if ``present`` contains none of them, the last alternative is yielded. The UNSHARD that ``action`` needs
    depends on the order of the actions, so it is yielded only if ``present`` is an Index.
    """
    for need in action.kind.row.needs:
        if need.at is At.EVERY and action._replace(kind=need.kinds[0]) not in present:
            continue
        if need.at is At.NUMBERED:
            numbered = (Action(action.stage, need.kinds[0], number) for number in count())
            yield from takewhile(present.__contains__, numbered)
            continue
        if need.at is At.GATHER:
            if isinstance(present, Index) and present.has_gathers[action.stage]:
                yield Action(action.stage, need.kinds[0], present.gather_of(action))
            continue
        for end in _ends_of(action, need.at, graph):
            forms = [_form(action, need.at, kind, end) for kind in need.kinds]
            yield next((form for form in forms if form in present), forms[-1])


def _ends_of(action: Action, at: At, graph: StageGraph) -> tuple[int, ...]:
    match at:
        case At.PRODUCERS:
            return graph.producers[action.stage]
        case At.CONSUMERS:
            return graph.consumers[action.stage]
        case At.PEER:
            return () if action.peer is None else (action.peer,)
        case At.EVERY:
            return tuple(range(len(graph.producers)))
    return (action.stage,)


def _form(action: Action, at: At, kind: Kind, end: int) -> Action:
    """Build the action of the given kind that ``action`` may need.

    - If ``at`` is PEER, ``action`` is a receive: return the matching send on stage ``end``.
    - If ``kind`` is a receive, return the receive from stage ``end`` on the action's own stage.
    - Otherwise, return the action of this kind on stage ``end``.
    """
    if at is At.PEER:
        return Action(end, kind, action.microbatch, action.stage)
    if kind in OTHER_END:
        return Action(action.stage, kind, action.microbatch, end)
    return Action(end, kind, action.microbatch)


class Index:
    """A lookup table from actions to their rows in a program's columns, with -1 for actions not in the program.

    The table has a slot for each (kind, edge, micro-batch) of transfers, and for each (kind, stage, micro-batch) of
    other actions. Kinds in ``NUMBERED`` use their own number instead of the micro-batch.
    """

    def __init__(self, columns: Columns, graph: StageGraph, num_microbatches: int) -> None:
        self._graph = graph
        self._num_stages = len(graph.producers)
        self._num_microbatches = num_microbatches
        self._bases = np.full(NUM_KINDS, -1, np.int64)
        #: For each kind, the number of slots per stage or per edge.
        self._widths = np.full(NUM_KINDS, max(0, num_microbatches), np.int64)
        counts = np.bincount(columns.kind, minlength=NUM_KINDS)
        for kind in NUMBERED:
            numbers = columns.microbatch[columns.are(kind)] if counts[CODES[kind]] else columns.microbatch[:0]
            self._widths[CODES[kind]] = 1 + numbers.max(initial=-1)
        self._same_width = not counts[[CODES[kind] for kind in NUMBERED]].any()
        size = 0
        for code in np.flatnonzero(counts):
            self._bases[code] = size
            rows = len(graph.edge_codes) if _CODE_IS_TRANSFER[code] else self._num_stages
            size += rows * int(self._widths[code])
            if size > MOST_SLOTS * (len(columns) + 1024):
                raise ScheduleError(
                    f"every stage must run every micro-batch; there are {counted(self._num_stages, 'stage')} and "
                    f"{shown(num_microbatches)} micro-batches, but only {counted(len(columns), 'action')}; "
                    f"correct the counts, or add the missing actions"
                )
        self._table = np.full(size + 1, -1, np.int32)  # the extra last slot stays -1, for all invalid actions
        self.slots = self._slots(columns.kind, columns.stage, columns.microbatch, columns.peer)
        self._table[self.slots] = np.arange(len(columns))
        self._table[size] = -1

    def _slots(self, kind: Ints, stage: Ints, microbatch: Ints, peer: Ints) -> Ints:
        microbatch = microbatch.astype(np.int64)
        line = stage.astype(np.int64)
        width = self._num_microbatches if self._same_width else self._widths[kind]
        good = (line >= 0) & (line < self._num_stages) & (microbatch >= 0) & (microbatch < width)
        transfer = _CODE_IS_TRANSFER[kind]
        if transfer.any():
            line = line.copy()
            good = good.copy()
            line[transfer], known = self._edges(kind[transfer], line[transfer], peer[transfer].astype(np.int64))
            good[transfer] &= known
        else:
            good &= peer < 0
        slots = self._bases[kind] + line * width + microbatch
        return np.where(good & (self._bases[kind] >= 0), slots, len(self._table) - 1)

    def _edges(self, kind: Ints, stage: Ints, peer: Ints) -> tuple[Ints, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """Return the index of each transfer's edge in ``edge_codes``, and a mask of the transfers that have an edge."""
        codes = self._graph.edge_codes
        outward = _CODE_IS_OUTWARD[kind]  # the action's stage is the edge's producer
        wanted = np.where(outward, stage * self._num_stages + peer, peer * self._num_stages + stage)
        numbers = np.minimum(np.searchsorted(codes, wanted), max(0, len(codes) - 1))
        known = (codes[numbers] == wanted) & (peer >= 0) if len(codes) else np.zeros(len(kind), np.bool_)
        return numbers, known

    def rows(self, kind: Kind, stage: Ints, microbatch: Ints, peer: Ints | None = None) -> Ints:
        """Return the rows of several actions of one kind; -1 for actions that are not in the program."""
        if self._bases[CODES[kind]] < 0:
            return np.full(len(stage), -1, np.int64)
        kinds = np.full(len(stage), CODES[kind])
        peers = np.full(len(stage), -1) if peer is None else peer
        return self._table[self._slots(kinds, stage, microbatch, peers)]

    def row(self, action: Action) -> int:
        """Return the row of an action; -1 if it is not in the program."""
        stage, kind, microbatch, peer = action
        ends = None if peer is None else np.array([peer])
        return int(self.rows(kind, np.array([stage]), np.array([microbatch]), ends)[0])

    def __contains__(self, action: object) -> bool:
        return isinstance(action, Action) and self.row(action) >= 0

    def has(self, *kinds: Kind) -> bool:
        """Return whether the program has an action of one of these kinds."""
        return any(self._bases[CODES[kind]] >= 0 for kind in kinds)

    def grid(self, kind: Kind) -> Ints:
        """Return the rows of all actions of a compute kind, as a table [stage, micro-batch]; -1 for missing actions."""
        shape = self._num_stages, self._num_microbatches
        base = int(self._bases[CODES[kind]])
        if base < 0:
            return np.full(shape, -1, np.int32)
        return self._table[base : base + shape[0] * shape[1]].reshape(shape)

    def most(self, kind: Kind) -> int:
        """Return the number of table slots per stage for a kind: for those in ``NUMBERED``, the largest count."""
        return int(self._widths[CODES[kind]])

    @cached_property
    def has_gathers(self) -> Mask:
        """For each stage, whether it has an UNSHARD."""
        if not self.has(Kind.UNSHARD):
            return np.zeros(self._num_stages, np.bool_)
        return np.asarray((self._numbered(Kind.UNSHARD) >= 0).any(axis=1))

    @cached_property
    def _reshards(self) -> list[Ints]:
        """For each stage, the rows of its RESHARDs in ascending order."""
        return [np.sort(rows[rows >= 0]) for rows in self._numbered(Kind.RESHARD)]

    def _numbered(self, kind: Kind) -> Ints:
        stages = np.arange(self._num_stages)
        return np.stack([self.rows(kind, stages, np.full(len(stages), n)) for n in range(self.most(kind))], axis=1)

    def gather_of(self, action: Action) -> int:
        """Return the number of the UNSHARD whose weights an action uses: the count of its stage's earlier RESHARDs."""
        return int(self.gathers_of(np.array([self.row(action)]), np.array([action.stage]))[0])

    def gathers_of(self, rows: Ints, stage: Ints) -> Ints:
        """Return the number of the UNSHARD whose weights each row uses."""
        numbers = np.zeros(len(rows), np.int64)
        for own in np.unique(stage).tolist() if self.has(Kind.RESHARD) else ():
            numbers[stage == own] = np.searchsorted(self._reshards[own], rows[stage == own])
        return numbers

    def repeated(self) -> Ints:
        """Return the rows whose action occurs again later, and the rows with an invalid stage, micro-batch or edge."""
        return np.flatnonzero(self._table[self.slots] != np.arange(len(self.slots)))


_CODE_IS_TRANSFER = np.array([kind in OTHER_END for kind in Kind])
_TRANSFERS = [kind.row.transfer for kind in Kind]
_CODE_IS_OUTWARD = np.array([way is not None and way.sends != way.backward for way in _TRANSFERS])


class Requirements(NamedTuple):
    """Dependencies as pairs of rows: the action ``needed[i]`` must have ended before the action ``row[i]`` starts.

    ``needed[i]`` is -1 if the program does not contain the needed action.
    """

    row: Ints
    needed: Ints


def requirements(columns: Columns, index: Index, graph: StageGraph) -> Requirements:
    """Compute the dependencies of all actions of a program."""
    pairs: list[tuple[Ints, Ints]] = []
    producers = graph.ends(graph.producers)
    consumers = graph.ends(graph.consumers)
    for kind in filter(index.has, Kind):
        rows = np.flatnonzero(columns.kind == CODES[kind])
        for need in kind.row.needs:
            if need.at is At.EVERY:
                rows = rows[index.rows(need.kinds[0], columns.stage[rows], columns.microbatch[rows]) >= 0]
            if need.at is At.NUMBERED:
                pairs += _numbered(need.kinds[0], rows, columns.stage[rows], index)
                continue
            if need.at is At.GATHER:
                pairs += _gathers(rows, columns.stage[rows], index)
                continue
            stage = columns.stage[rows].astype(np.int64)
            for ends in _ends(need.at, stage, columns.peer[rows], producers, consumers, len(graph.producers)):
                chosen = ends >= 0
                some = columns[rows[chosen]]
                pairs.append((rows[chosen], _first_form(need, some, ends[chosen], index)))
    if not pairs:
        return Requirements(np.zeros(0, np.int64), np.zeros(0, np.int64))
    row, needed = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return Requirements(row, needed)


def _numbered(kind: Kind, rows: Ints, stage: Ints, index: Index) -> Iterator[tuple[Ints, Ints]]:
    """Yield the dependencies of rows that need all actions of a kind in ``NUMBERED`` on their stage.

    For each number, yields (rows that need the action with this number, rows of the needed actions).
    """
    for number in range(index.most(kind) if index.has(kind) else 0):
        needed = index.rows(kind, stage, np.full(len(stage), number))
        yield rows[needed >= 0], needed[needed >= 0]


def _gathers(rows: Ints, stage: Ints, index: Index) -> Iterator[tuple[Ints, Ints]]:
    """Yield the rows whose stages have UNSHARDs, and, for each of these rows, the row of the UNSHARD that it needs."""
    if index.has(Kind.UNSHARD):
        gathered = index.has_gathers[stage]
        rows = rows[gathered]
        stage = stage[gathered]
        yield rows, index.rows(Kind.UNSHARD, stage, index.gathers_of(rows, stage))


def _ends(
    at: At, stage: Ints, peer: Ints, producers: Sequence[Ints], consumers: Sequence[Ints], num_stages: int
) -> Iterator[Ints]:
    match at:
        case At.OWN:
            yield stage
        case At.PEER:
            yield peer
        case At.PRODUCERS:
            yield from (ends[stage] for ends in producers)
        case At.CONSUMERS:
            yield from (ends[stage] for ends in consumers)
        case At.EVERY:
            yield from (np.full(len(stage), end) for end in range(num_stages))


def _first_form(need: Need, columns: Columns, ends: Ints, index: Index) -> Ints:
    """Return, for each action, the row of the first alternative of ``need`` that the program has; -1 if none."""
    first_rows = np.full(len(ends), -1, np.int64)
    for kind in need.kinds:
        if not index.has(kind):
            continue
        if need.at is At.PEER:
            rows = index.rows(kind, ends, columns.microbatch, columns.stage)
        elif kind in OTHER_END:
            rows = index.rows(kind, columns.stage, columns.microbatch, ends)
        else:
            rows = index.rows(kind, ends, columns.microbatch)
        first_rows = np.where(first_rows < 0, rows, first_rows)
    return first_rows
