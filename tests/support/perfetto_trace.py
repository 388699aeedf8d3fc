"""Perfetto traces: reads a file in Perfetto's format with the protos of the package perfetto."""

from collections import defaultdict
from pathlib import Path

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

__all__ = ["PerfettoTrace"]


class PerfettoTrace:
    """The content of a trace file: slices by rank and lane, counters by rank and name, and arrows."""

    def __init__(self, path: Path) -> None:
        trace = protos.Trace()
        trace.ParseFromString(path.read_bytes())
        described = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
        tracks = {track.uuid: track for track in described}
        self.slices, self.counters = defaultdict(list), defaultdict(list)
        self.senders, self.receivers = {}, {}
        opened = {}
        for packet in trace.packet:
            if not packet.HasField("track_event"):
                continue
            event, track = packet.track_event, tracks[packet.track_event.track_uuid]
            rank = int(tracks[track.parent_uuid].process.process_name.removeprefix("rank "))
            if event.type == protos.TrackEvent.TYPE_COUNTER:
                self.counters[rank, track.name].append((packet.timestamp, event.counter_value))
            elif event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
                opened[track.uuid] = packet.timestamp, event.name
                self.senders |= dict.fromkeys(event.flow_ids, (rank, event.name))
                self.receivers |= dict.fromkeys(event.terminating_flow_ids, (rank, event.name))
            else:
                start, name = opened.pop(track.uuid)
                self.slices[rank, track.name].append((name, start, packet.timestamp))
        assert not opened

    @property
    def bubble_ratio(self) -> float:
        """The ranks' idle time / (ranks x makespan), computed from the slices."""
        rows = [slices for (_, lane), slices in self.slices.items() if lane == "compute"]
        ends = [end for slices in rows for *_, end in slices]
        starts = [start for slices in rows for _, start, _ in slices]
        busy = sum(end - start for slices in rows for _, start, end in slices)
        return 1 - busy / (len(rows) * (max(ends) - min(starts)))
