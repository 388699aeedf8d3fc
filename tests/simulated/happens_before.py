"""The judge: which operation comes after which, by streams, events, host threads and the allocator. No torch here.

An operation on a stream comes after the earlier operations of the stream, after the events that the stream waits for,
and after all that the launching thread has waited for. A read must come after the last write, and a write after the
last write and all reads since. Memory that is freed may be allocated again at once, on the stream that allocated it:
the new owner's first use must come after the old owners' uses. Uses on streams that `record_stream` named are excepted.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tests.simulated.device_time import DeviceCosts
from tests.simulated.lanes import HostThread, Stamp, Stream
from tests.simulated.violations import Operation, Violation, ViolationKind

__all__ = ["HappensBefore", "StreamSpan", "stream_key"]

_DEVICE_SHIFT = 40  # the key of a stream: its device, then its number on the device


class _Access(NamedTuple):
    """A use of memory by an operation on a stream."""

    stream: Stream
    number: int
    host: HostThread
    name: str
    place: int
    label: Any


class _FreedUse(NamedTuple):
    """A use of freed memory that an allocation on the same stream may meet."""

    access: _Access
    nbytes: int
    place: int


class _Block:
    __slots__ = ("former", "nbytes", "owner", "reads", "recorded", "write")

    def __init__(self, nbytes: int, owner: int | None) -> None:
        self.nbytes = nbytes
        self.owner = owner  # the key of the stream that allocated it; None: pinned memory
        self.write: _Access | None = None
        self.reads: dict[Stream, _Access] = {}
        self.recorded: set[int] = set()
        self.former: list[_FreedUse] = []  # until the first use

    def accesses(self) -> list[_Access]:
        return [*self.reads.values()] if self.write is None else [self.write, *self.reads.values()]


class StreamSpan(NamedTuple):
    """The time that an operation took on its stream."""

    stream: str
    name: str
    start_s: float
    end_s: float
    label: Any


class HappensBefore:
    """Judges operations as they are reported.

    Each report names the thread that makes it. Streams are named by keys (see `stream_key`), blocks and events by
    numbers, places in code by numbers that `frames_of` resolves.

    Args:
        take_log: returns what happened since the last call, see `_READERS`; called before every report is read.
        frames_of: returns the frames (file, line) of a place.
        thread_name: returns the name of a thread.
        costs: what operations cost. May be replaced at any time.
        width: room for so many streams at first.

    """

    def __init__(
        self,
        take_log: Callable[[], Sequence[tuple[Any, ...]]] = tuple,
        frames_of: Callable[[int], Iterable[tuple[str, int]]] = lambda place: (("", place),),
        thread_name: Callable[[int], str] = lambda thread: f"thread {thread}",
        costs: DeviceCosts | None = None,
        width: int = 64,
    ) -> None:
        self._width = width
        self.costs = costs or DeviceCosts()
        self.violations: list[Violation] = []
        #: launches, copies, events, waits, allocations, host synchronisations, hidden synchronisations
        self.counts: Counter[str] = Counter()
        #: The same two kinds of synchronisations, by thread and place.
        self.synchronisations: Counter[tuple[str, str, tuple[tuple[str, int], ...]]] = Counter()
        #: If it is a list: the time of each operation is added.
        self.spans: list[StreamSpan] | None = None
        self._take_log = take_log
        self._frames_of = frames_of
        self._thread_name = thread_name
        self._lock = threading.RLock()  # the garbage collector may end threads of a pipeline meanwhile
        self._streams: dict[int, Stream] = {}
        self._hosts: dict[int, HostThread] = {}
        self._events: dict[int, Stamp] = {}
        self._blocks: dict[int, _Block] = {}

    def forget(self) -> None:
        """Start anew: all operations so far are done, and counts, times and violations are gone. Memory stays."""
        with self._lock:
            self._read_log()
            for records in (self._streams, self._hosts, self._events, self.counts, self.synchronisations):
                records.clear()
            self.violations = []
            self.spans = None
            self._blocks = {number: _Block(block.nbytes, block.owner) for number, block in self._blocks.items()}

    # ---- reports: operations ----
    def launch(
        self,
        thread: int,
        stream: int,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        nbytes: int = 0,
        flops: float = 0.0,
        place: int = 0,
    ) -> None:
        """Read a report: an operation on a stream, with the blocks that it reads and writes."""
        with self._lock:
            self._read_log()
            self.counts["launches"] += 1
            self._run(
                self._host(thread), self._stream(stream), name, reads, writes,
                self.costs.operation_s(name, nbytes, flops), place,
            )  # fmt: skip

    def copied(
        self,
        thread: int,
        source: int | None,
        target: int | None,
        read: int,
        written: int,
        non_blocking: bool,
        nbytes: int = 0,
        place: int = 0,
    ) -> None:
        """Read a report: a copy, by CUDA's rules. `source` and `target` are streams, or None for the host.

        Between devices, the copy runs on the source's stream, and each of the two streams waits for the other. A copy
        to or from the host blocks the host, unless the host's memory is pinned and `non_blocking` is set.
        """
        with self._lock:
            self._read_log()
            self.counts["copies"] += 1
            host = self._host(thread)
            if source is not None and target is not None:
                self._copy_between(host, self._stream(source), self._stream(target), (read, written), nbytes, place)
            else:
                self._copy_with_host(host, source, target, (read, written), (non_blocking, nbytes, place))

    def _copy_between(
        self, host: HostThread, here: Stream, there: Stream, ends: tuple[int, int], nbytes: int, place: int
    ) -> None:
        across = here.device != there.device
        seconds = self.costs.copy_s(nbytes, with_host=False) if across else self.costs.operation_s("copy_", nbytes, 0)
        if across:
            here.learn(there.stamp())
        self._run(host, here, "aten::copy_", ends[:1], ends[1:], seconds, place)
        if across:
            there.learn(here.stamp())

    def _copy_with_host(
        self,
        host: HostThread,
        source: int | None,
        target: int | None,
        ends: tuple[int, int],
        how: tuple[bool, int, int],
    ) -> None:
        non_blocking, nbytes, place = how
        stream = self._stream(target if source is None else source)
        block = self._blocks.get(ends[source is not None])
        pinned = block is not None and block.owner is None
        self._run(host, stream, "aten::copy_", ends[:1], ends[1:], self.costs.copy_s(nbytes, with_host=True), place)
        if not non_blocking:
            self._synchronise(host, stream.stamp(), "copy", place)
        elif not pinned:
            self._count_synchronisation("hidden", "copy of pageable memory", host, place)
            if source is not None:
                host.learn(stream.stamp())

    def transferred(
        self,
        thread: int,
        stream: int,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        nbytes: int = 0,
        not_before_s: float = 0.0,
        place: int = 0,
    ) -> Stamp:
        """Read a report: a transfer between processes, as an operation on a stream. Return the moment of its end.

        `not_before_s` is the virtual time at which the other processes begin the transfer.
        """
        with self._lock:
            self._read_log()
            self.counts["transfers"] += 1
            host, here = self._host(thread), self._stream(stream)
            here.time_s = max(here.time_s, not_before_s)
            self._run(host, here, name, reads, writes, self.costs.copy_s(nbytes, with_host=False), place)
            return here.stamp()

    def stream_waits(self, thread: int, stream: int, stamp: Stamp) -> None:
        """Read a report: a thread made a stream wait for a moment of another stream."""
        with self._lock:
            self._read_log()
            self.counts["waits"] += 1
            here = self._stream(stream)
            here.follow(self._host(thread))
            here.learn(stamp)

    def host_access(self, thread: int, name: str, reads: Sequence[int], writes: Sequence[int], place: int = 0) -> None:
        """Read a report: the host reads or writes pinned memory."""
        with self._lock:
            self._read_log()
            host = self._host(thread)
            now = Operation(name, None, None, host.name, host.label, tuple(self._frames_of(place)))
            for number in {*reads, *writes}:
                block = self._blocks.get(number)
                if block is None:
                    continue
                writing = number in writes
                for access in block.accesses() if writing else filter(None, (block.write,)):
                    if not host.knows(access.stream, access.number):
                        kind = ViolationKind.PINNED_REUSED if writing else ViolationKind.HOST_READ
                        self.violations.append(Violation(kind, self._operation(access), now, block.nbytes))
                if writing:
                    block.write, block.reads = None, {}

    # ---- reports: waits of the host, and questions ----
    def stream_synchronized(self, thread: int, stream: int, place: int = 0) -> None:
        """Read a report: the host waited for a stream."""
        with self._lock:
            self._read_log()
            self._synchronise(self._host(thread), self._stream(stream).stamp(), "stream", place)

    def event_synchronized(self, thread: int, event: int, place: int = 0) -> None:
        """Read a report: the host waited for an event."""
        with self._lock:
            self._read_log()
            stamp = self._events.get(event)
            if stamp is not None:
                self._synchronise(self._host(thread), stamp, "event", place)

    def device_synchronized(self, thread: int, device: int, place: int = 0) -> None:
        """Read a report: the host waited for all streams of a device."""
        with self._lock:
            self._read_log()
            host = self._host(thread)
            self._count_synchronisation("host", "device", host, place)
            for stream in [*self._streams.values()]:
                if stream.device == device:
                    host.learn(stream.stamp())

    def event_done(self, thread: int, event: int) -> bool:
        """Whether the thread knows that an event is done. An event that was never recorded is done."""
        with self._lock:
            self._read_log()
            stamp = self._events.get(event)
            return stamp is None or self._host(thread).knows(stamp.stream, stamp.number)

    def knows(self, thread: int, stamp: Stamp) -> bool:
        """Whether a thread knows that a stream has reached a moment."""
        with self._lock:
            self._read_log()
            return self._host(thread).knows(stamp.stream, stamp.number)

    def ready_s(self, thread: int, stream: int) -> float:
        """Return the virtual time at which a stream can begin an operation that a thread launches now."""
        with self._lock:
            self._read_log()
            return max(self._stream(stream).time_s, self._host(thread).time_s)

    def elapsed_ms(self, start: int, end: int) -> float:
        """Return the virtual time between two events."""
        with self._lock:
            self._read_log()
            return (self._events[end].time_s - self._events[start].time_s) * 1e3

    # ---- host threads ----
    def hand_over(self, thread: int) -> Stamp:
        """Return what a thread knows now, for another thread that comes after it."""
        with self._lock:
            return self._host(thread).stamp()

    def take_over(self, thread: int, stamp: Stamp) -> None:
        """Let a thread know what another thread knew when it handed over."""
        with self._lock:
            self._host(thread).learn(stamp)

    def thread_started(self, thread: int, stamp: Stamp) -> None:
        """Begin a thread, which comes after the moment when another thread started it."""
        with self._lock:
            self._hosts.pop(thread, None)
            self._host(thread).learn(stamp)

    def works_on(self, thread: int, label: Any) -> None:
        """Say what a thread works on from now on. Violations show it."""
        with self._lock:
            self._host(thread).label = label

    def host_time_s(self, thread: int) -> float:
        """Return a thread's virtual time."""
        with self._lock:
            return self._host(thread).time_s

    # ---- the log ----
    def read(self) -> None:
        """Read the log now."""
        with self._lock:
            self._read_log()

    def _read_log(self) -> None:
        for what, *rest in self._take_log():
            _READERS[what](self, *rest)

    def _allocated(self, thread: int, block: int, stream: int, nbytes: int) -> None:
        self.counts["allocations"] += 1
        made = self._blocks[block] = _Block(nbytes, stream)
        owner = self._streams.get(stream)
        if owner is None or not owner.pending:
            return
        host = self._host(thread)
        for other, use in [*owner.pending.items()]:
            if owner.knows(other, use.access.number) or host.knows(other, use.access.number):
                del owner.pending[other]
            else:
                made.former.append(use)

    def _pinned(self, thread: int, block: int, nbytes: int, _: int) -> None:
        self._blocks[block] = _Block(nbytes, None)

    def _freed(self, thread: int, block: int, place: int, _: int) -> None:
        freed = self._blocks.pop(block, None)
        if freed is None or freed.owner is None:  # the allocator of pinned memory waits for its copies
            return
        owner, host = self._stream(freed.owner), self._host(thread)
        # The allocator waits until the recorded streams have reached this moment, with all that they waited for.
        lanes = [owner, host, *map(self._stream, freed.recorded)]
        for access in freed.accesses():
            stream, number, user = access[:3]
            # A thread that used the memory has dropped its reference, so the free comes after what it waited for.
            if stream in lanes or any(lane.knows(stream, number) for lane in (*lanes, user)):
                continue
            if stream not in owner.pending or owner.pending[stream].access.number < number:
                owner.pending[stream] = _FreedUse(access, freed.nbytes, place)

    def _recorded_on(self, thread: int, block: int, stream: int, _: int) -> None:
        if block in self._blocks:
            self._blocks[block].recorded.add(stream)

    def _recorded(self, thread: int, event: int, stream: int, _: int) -> None:
        self.counts["events"] += 1
        here = self._stream(stream)
        host = self._host(thread)
        here.follow(host)
        here.time_s = max(here.time_s, host.time_s)
        self._events[event] = here.stamp()

    def _waited(self, thread: int, event: int, stream: int, _: int) -> None:
        self.counts["waits"] += 1
        here = self._stream(stream)
        here.follow(self._host(thread))
        stamp = self._events.get(event)
        if stamp is not None:
            here.learn(stamp)

    def _event_gone(self, thread: int, event: int, *_: int) -> None:
        self._events.pop(event, None)

    # ---- lanes ----
    def _stream(self, key: int) -> Stream:
        found = self._streams.get(key)
        if found is None:
            device, number = key >> _DEVICE_SHIFT, key & ((1 << _DEVICE_SHIFT) - 1)
            found = self._streams[key] = Stream(len(self._streams), (device, number), self._width)
        return found

    def _host(self, thread: int) -> HostThread:
        found = self._hosts.get(thread)
        if found is None:
            found = self._hosts[thread] = HostThread(self._thread_name(thread), self._width)
        return found

    def _synchronise(self, host: HostThread, stamp: Stamp, what: str, place: int) -> None:
        self._count_synchronisation("host", what, host, place)
        host.learn(stamp)

    def _count_synchronisation(self, kind: str, what: str, host: HostThread, place: int) -> None:
        self.counts[f"{kind} synchronisations"] += 1
        self.synchronisations[f"{kind}: {what}", host.name, tuple(self._frames_of(place))] += 1

    # ---- the rules of memory ----
    def _run(
        self,
        host: HostThread,
        stream: Stream,
        name: str,
        reads: Sequence[int],
        writes: Sequence[int],
        seconds: float,
        place: int,
    ) -> None:
        stream.follow(host)
        stream.number += 1
        start_s = max(stream.time_s, host.time_s)
        stream.time_s = start_s + seconds
        host.time_s += self.costs.launch_s
        if self.spans is not None:
            self.spans.append(StreamSpan(str(stream), name, start_s, stream.time_s, host.label))
        access = _Access(stream, stream.number, host, name, place, host.label)
        blocks = self._blocks
        for number in reads:
            block = blocks.get(number)
            if block is None or number in writes:
                continue
            if block.former:
                self._meet_former(block, access)
            write = block.write
            if write is not None and write.stream is not stream and not stream.knows(write.stream, write.number):
                kind = ViolationKind.HOST_READ if name == "aten::item" else ViolationKind.READ
                self._violated(kind, write, access, block.nbytes)
            block.reads[stream] = access
        for number in writes:
            block = blocks.get(number)
            if block is not None:
                self._written(block, access)

    def _written(self, block: _Block, access: _Access) -> None:
        stream, write = access.stream, block.write
        if write is access:  # an operation may write a block twice
            return
        if block.former:
            self._meet_former(block, access)
        if write is not None and write.stream is not stream and not stream.knows(write.stream, write.number):
            self._violated(ViolationKind.WRITTEN_TWICE, write, access, block.nbytes)
        if block.reads:
            for other, read in block.reads.items():
                if other is not stream and not stream.knows(other, read.number):
                    self._violated(ViolationKind.OVERWRITTEN, read, access, block.nbytes)
            block.reads = {}
        block.write = access

    def _meet_former(self, block: _Block, access: _Access) -> None:
        """The first use of a block: it must come after the uses of the memory by its former owners."""
        for former, nbytes, place in block.former:
            if former.stream is not access.stream and not access.stream.knows(former.stream, former.number):
                self._violated(ViolationKind.FREED, former, access, nbytes, place)
        block.former = []

    def _violated(
        self, kind: ViolationKind, earlier: _Access, later: _Access, nbytes: int, freed_place: int | None = None
    ) -> None:
        freed_at = () if freed_place is None else tuple(self._frames_of(freed_place))
        self.violations.append(Violation(kind, self._operation(earlier), self._operation(later), nbytes, freed_at))

    def _operation(self, access: _Access) -> Operation:
        stream, _, host, name, place, label = access
        return Operation(name, str(stream), stream.device, host.name, label, tuple(self._frames_of(place)))


#: The entries of the log: ("name", thread, three numbers).
_READERS: dict[str, Callable[..., None]] = {
    "allocated": HappensBefore._allocated,
    "pinned": HappensBefore._pinned,
    "freed": HappensBefore._freed,
    "recorded on": HappensBefore._recorded_on,
    "recorded": HappensBefore._recorded,
    "waited": HappensBefore._waited,
    "event gone": HappensBefore._event_gone,
}


def stream_key(device: int, number: int) -> int:
    """Return the key of a stream."""
    return device << _DEVICE_SHIFT | number
