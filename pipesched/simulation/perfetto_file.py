"""Perfetto file: writes a trace in Perfetto's own format, with counters of memory and arrows for messages."""

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

from pipesched.errors import InputError
from pipesched.program.actions import Action, Kind, Lane

if TYPE_CHECKING:
    from pipesched.simulation.trace import Trace

__all__ = ["perfetto_bytes"]

_SEQUENCE = 1  # all packets form one sequence, as one writer's do
_FORWARD, _BACKWARD = (Kind.F,), (Kind.B, Kind.I)


def perfetto_bytes(trace: "Trace") -> bytes:
    """Return the content of the file that ``Trace.to_perfetto`` writes."""
    try:
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError as error:
        raise InputError(
            f"a trace in Perfetto's format needs the package perfetto; importing it failed ({error}); pip install "
            f"'pipesched[perfetto]', or use to_chrome, whose files Perfetto also opens"
        ) from error
    writer = _PacketWriter(trace, TraceProtoBuilder())
    for rank in range(trace.num_ranks):
        writer.rank(rank)
    writer.slices()
    return bytes(writer.builder.serialize())


class _PacketWriter:
    """Adds the packets of a trace: a process for each rank, with a track for each lane and two counters."""

    def __init__(self, trace: "Trace", builder: Any) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

        self.builder = builder
        self._trace = trace
        self._event = protos.TrackEvent
        self._uuids = count(1)
        self._lanes: dict[tuple[int, Lane], int] = {}
        self._start_s = min((float(span.start_s) for span in trace.spans), default=0.0)  # a receive may wait before
        self._used = {(span.rank, span.lane) for span in trace.spans}

    def rank(self, rank: int) -> None:
        """Describe the tracks of a rank, and add the values of its counters."""
        process = self._track(f"rank {rank}")
        process.process.pid = rank + 1  # 0 is the kernel's
        process.process.process_name = f"rank {rank}"
        for lane in Lane:
            if (rank, lane) in self._used:
                self._lanes[rank, lane] = self._track(str(lane), process.uuid).uuid
        self._counter("bytes held", process.uuid, self._trace.memory(rank))
        self._counter("pairs in flight", process.uuid, self._trace.in_flight(rank))

    def slices(self) -> None:
        """Add a slice for each span, and an arrow from each sender to its receiver."""
        starts, ends = _arrows(self._trace)
        for number, span in enumerate(self._trace.spans):
            track = self._lanes[span.rank, span.lane]
            begin = self._packet(span.start_s)
            begin.track_event.type = self._event.TYPE_SLICE_BEGIN
            begin.track_event.track_uuid = track
            begin.track_event.name = str(span.action)
            begin.track_event.categories.append(str(span.action.kind))
            begin.track_event.flow_ids.extend(starts.get(number, ()))
            begin.track_event.terminating_flow_ids.extend(ends.get(number, ()))
            for name, value in (("stage", span.action.stage), ("microbatch", span.action.microbatch)):
                note = begin.track_event.debug_annotations.add()
                note.name, note.int_value = name, value
            end = self._packet(span.end_s)
            end.track_event.type = self._event.TYPE_SLICE_END
            end.track_event.track_uuid = track

    def _counter(self, name: str, parent: int, values: Iterator[tuple[float, int]]) -> None:
        track = self._track(name, parent)
        track.counter.SetInParent()
        for time_s, value in values:
            packet = self._packet(time_s)
            packet.track_event.type = self._event.TYPE_COUNTER
            packet.track_event.track_uuid = track.uuid
            packet.track_event.counter_value = value

    def _track(self, name: str, parent: int | None = None) -> Any:
        track = self.builder.add_packet().track_descriptor
        track.uuid, track.name = next(self._uuids), name
        if parent is not None:
            track.parent_uuid = parent
        return track

    def _packet(self, time_s: float) -> Any:
        packet = self.builder.add_packet()
        packet.timestamp = round((float(time_s) - self._start_s) * 1e9)
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet


def _arrows(trace: "Trace") -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the numbers of the arrows that start and that end at each span.

    A forward sends its output to the forwards of other ranks that need it, and a backward its gradients. A trace
    without messages has a chain of stages.
    """
    places = {(span.action.stage, span.action.microbatch, span.action.kind): at for at, span in enumerate(trace.spans)}
    ranks = [span.rank for span in trace.spans]
    starts: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, (action, other) in enumerate(_messages(trace)):
        kinds = _FORWARD if action.kind in (Kind.F, Kind.SEND_F) else _BACKWARD
        given, taken = (
            next((places[key] for kind in kinds if (key := (stage, action.microbatch, kind)) in places), None)
            for stage in (action.stage, other)
        )
        if given is not None and taken is not None and ranks[given] != ranks[taken]:
            starts.setdefault(given, []).append(number + 1)
            ends.setdefault(taken, []).append(number + 1)
    return starts, ends


def _messages(trace: "Trace") -> Iterator[tuple[Action, int | None]]:
    """Yield each action that sends, with the stage that receives."""
    sends = [span.action for span in trace.spans if span.action.kind in (Kind.SEND_F, Kind.SEND_B)]
    if sends:
        yield from ((action, action.peer) for action in sends)
        return
    for span in trace.spans:
        if span.action.kind in _FORWARD:
            yield span.action, span.action.stage + 1
        elif span.action.kind in _BACKWARD:
            yield span.action, span.action.stage - 1
