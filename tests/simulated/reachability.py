"""The judge's rules again, by brute force: a graph of all operations, and what reaches what in it."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import networkx as nx

from tests.simulated.violations import ViolationKind

__all__ = ["BruteForce"]

_Pair = tuple[str, int, int]  # kind, place of the earlier operation, place of the later one


@dataclass
class _Memory:
    owner: int | None
    write: int | None = None
    reads: dict[int, int] = field(default_factory=dict)  # stream -> its last read since the write
    recorded: set[int] = field(default_factory=set)
    former: set[int] = field(default_factory=set)

    def uses(self) -> set[int]:
        return {*self.reads.values()} | ({self.write} - {None})


class BruteForce:
    """Adds each step of a program to a graph. Steps are numbered by their place in the program.

    A node of the graph is a moment: the end of an operation on a stream, or the return of a call in a host thread.
    """

    def __init__(self) -> None:
        self.found: set[_Pair] = set()
        self.graph = nx.DiGraph()
        self._last: dict[tuple[str, int], int] = {}  # the last moment of each stream and thread
        self._events: dict[int, int] = {}
        self._memory: dict[int, _Memory] = {}
        self._by: dict[int, tuple[int, int]] = {}  # operation -> its stream and thread
        self._left: defaultdict[int, set[int]] = defaultdict(set)  # stream -> uses of memory that it freed

    def launch(self, place: int, thread: int, stream: int, reads: Iterable[int], writes: Iterable[int]) -> None:
        self._moment(place, ("stream", stream), ("host", thread))
        self._by[place] = stream, thread
        for block in {*reads} - {*writes}:
            memory = self._memory[block]
            self._meet(place, memory)
            self._judge(ViolationKind.READ, memory.write, place)
            memory.reads[stream] = place
        for block in {*writes}:
            memory = self._memory[block]
            self._meet(place, memory)
            self._judge(ViolationKind.WRITTEN_TWICE, memory.write, place)
            for read in memory.reads.values():
                self._judge(ViolationKind.OVERWRITTEN, read, place)
            memory.write, memory.reads = place, {}

    def record(self, place: int, thread: int, event: int, stream: int) -> None:
        self._moment(place, ("stream", stream), ("host", thread))
        self._events[event] = place

    def wait(self, place: int, thread: int, event: int, stream: int) -> None:
        self._moment(place, ("stream", stream), ("host", thread), also=self._events.get(event))

    def synchronize_event(self, place: int, thread: int, event: int) -> None:
        self._moment(place, ("host", thread), also=self._events.get(event))

    def synchronize_stream(self, place: int, thread: int, stream: int) -> None:
        self._moment(place, ("host", thread), ("stream", stream))

    def hand_over(self, place: int, giver: int, taker: int) -> None:
        self._moment(place, ("host", taker), ("host", giver))

    def knows(self, thread: int, event: int) -> bool:
        """Whether a thread comes after an event."""
        recorded = self._events.get(event)
        return recorded is None or self._before(recorded, ("host", thread))

    def allocate(self, thread: int, block: int, stream: int | None) -> None:
        made = self._memory[block] = _Memory(stream)
        if stream is not None:
            lanes = ("stream", stream), ("host", thread)
            made.former = {use for use in self._left[stream] if not any(self._before(use, lane) for lane in lanes)}

    def free(self, thread: int, block: int) -> None:
        freed = self._memory.pop(block)
        if freed.owner is None:
            return
        for use in freed.uses():
            stream, user = self._by[use]
            streams = freed.owner, *freed.recorded
            lanes = [("host", thread), ("host", user), *(("stream", one) for one in streams)]
            if stream in streams or any(self._before(use, lane) for lane in lanes):
                continue
            self._left[freed.owner].add(use)

    def record_stream(self, block: int, stream: int) -> None:
        self._memory[block].recorded.add(stream)

    def host_access(self, place: int, thread: int, block: int, writes: bool) -> None:
        memory = self._memory[block]
        kind = ViolationKind.PINNED_REUSED if writes else ViolationKind.HOST_READ
        for use in memory.uses() if writes else {memory.write} - {None}:
            if not self._before(use, ("host", thread)):
                self.found.add((kind, use, place))
        if writes:
            memory.write, memory.reads = None, {}

    def _moment(self, place: int, *lanes: tuple[str, int], also: int | None = None) -> None:
        """Add a moment of the first lane, after the last moments of all lanes."""
        self.graph.add_node(place)
        before = [self._last.get(lane) for lane in lanes] + [also]
        self.graph.add_edges_from((one, place) for one in before if one is not None)
        self._last[lanes[0]] = place

    def _before(self, place: int, lane: tuple[str, int]) -> bool:
        last = self._last.get(lane)
        return last is not None and nx.has_path(self.graph, place, last)

    def _judge(self, kind: ViolationKind, earlier: int | None, later: int) -> None:
        if earlier is not None and earlier != later and not nx.has_path(self.graph, earlier, later):
            self.found.add((kind, earlier, later))

    def _meet(self, place: int, memory: _Memory) -> None:
        """The first use of memory that may have had other owners: of their uses on one stream, the last is named."""
        last = {self._by[use][0]: use for use in sorted(memory.former)}
        for use in last.values():
            self._judge(ViolationKind.FREED, use, place)
        memory.former = set()
