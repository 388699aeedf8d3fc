"""Routes: the positions of the boxes in a layer picture, and the paths of the connections between them.

Layers are placed from left to right in rows ("lines"); a stage has one or more lines. A channel of horizontal tracks
runs below each line of boxes. Vertical lanes run beside the boxes: on the right for connections that skip lines, on the
left for tied weights. All connections that start at the same layer share their tracks and their lane.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ARCH", "HEIGHT", "WIDTH", "Layout", "Point"]

Point = tuple[float, float]

# All lengths are in inches.
WIDTH = 1.12  # width of a box
HEIGHT = 0.5  # height of a box
ARCH = 0.24  # space above a line of boxes for connections that pass over boxes of the same line
_GAP = 0.3  # gap between the boxes of a line
_TRACK = 0.13  # distance between two tracks of a channel
_LANE = 0.24  # distance between two lanes
_PAD = 0.16  # distance between the boxes and the first track
_CUT = 0.16  # additional space between two stages


@dataclass
class Layout:
    """The positions of boxes and connections, as (x, y) in inches, with y pointing down."""

    #: The layers of each stage, in the order in which they run.
    stages: Sequence[Sequence[str]]
    #: The largest number of boxes in a line.
    columns: int = 0
    #: The (stage, layers) pair of each line of boxes.
    lines: list[tuple[int, list[str]]] = field(default_factory=list)
    #: The upper edge of each line's boxes.
    tops: list[float] = field(default_factory=list)
    _line_of: dict[str, int] = field(default_factory=dict)
    _tracks: dict[tuple[int, Any], int] = field(default_factory=dict)
    _lanes: dict[tuple[str, Any], int] = field(default_factory=dict)
    _entries: dict[str, list[str]] = field(default_factory=dict)
    _arched: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        count = sum(map(len, self.stages))
        longest = max(map(len, self.stages))
        most = max(4, min(12, math.ceil(math.sqrt(1.2 * count))))
        even = max(-(-len(stage) // -(-len(stage) // most)) for stage in self.stages)
        self.columns = min(longest, even)
        for stage, layers in enumerate(self.stages):
            for first in range(0, len(layers), self.columns):
                self.lines.append((stage, list(layers[first : first + self.columns])))
        self._line_of = {name: line for line, (_, layers) in enumerate(self.lines) for name in layers}

    # ---- reservations: every connection reserves its tracks and lanes before anything is placed -------------------

    def reserve(self, edges: Collection[tuple[str, str]]) -> None:
        """Reserve tracks and lanes for connections between layers.

        The longest connections get the first tracks and the outer lanes.
        """
        reach: dict[str, int] = {}
        for before, behind in edges:
            reach[before] = max(reach.get(before, 0), self._line_of[behind])
        for before, behind in sorted(edges, key=lambda edge: -reach[edge[0]]):
            first = self._line_of[before]
            last = self._line_of[behind]
            if first == last:
                layers = self.lines[first][1]
                if layers.index(behind) > layers.index(before) + 1:
                    self._arched.add(first)
                continue
            self._track(first, before)
            self._entries.setdefault(behind, []).append(before)
            if last > first + 1:
                self._lane("right", before)
                self._track(last - 1, before)
        for behind, sources in self._entries.items():
            sources.sort(key=lambda before: self._comes_from(before, behind))

    def _comes_from(self, before: str, behind: str) -> float:
        beside = self._line_of[behind] == self._line_of[before] + 1
        return self.lines[self._line_of[before]][1].index(before) if beside else math.inf

    def reserve_tie(self, layers: Sequence[str], tie: Any) -> None:
        """Reserve a lane and tracks to connect layers with tied weights. ``tie`` identifies this connection."""
        self._lane("left", tie)
        for name in layers:
            self._track(self._line_of[name], ("tie", tie))

    def _track(self, channel: int, owner: Any) -> int:
        count = sum(1 for place, _ in self._tracks if place == channel)
        return self._tracks.setdefault((channel, owner), count)

    def _lane(self, side: str, owner: Any) -> int:
        count = sum(1 for place, _ in self._lanes if place == side)
        return self._lanes.setdefault((side, owner), count)

    def place(self) -> None:
        """Compute the vertical position of every line of boxes."""
        top = 0.0
        for line, (stage, _) in enumerate(self.lines):
            top += self.arch(line)
            self.tops.append(top)
            top += HEIGHT + self._channel(line)
            if line + 1 < len(self.lines) and self.lines[line + 1][0] != stage:
                top += _CUT
        self.bottom = top if self._has_tracks(len(self.lines) - 1) else self.tops[-1] + HEIGHT + 0.09

    def arch(self, line: int) -> float:
        """Return the space above a line's boxes for connections that pass over boxes, or 0 if there are none."""
        return ARCH if line in self._arched else 0.0

    def _has_tracks(self, line: int) -> bool:
        return any(place == line for place, _ in self._tracks)

    def _channel(self, line: int) -> float:
        count = sum(1 for place, _ in self._tracks if place == line)
        return 2 * _PAD + _TRACK * max(0, count - 1)

    # ---- positions ---------------------------------------------------------------------------------------------------

    def line_of(self, name: str) -> int:
        """Return the index of the line of boxes that contains a layer."""
        return self._line_of[name]

    def corner(self, name: str) -> Point:
        """Return the upper left corner of a layer's box."""
        line = self._line_of[name]
        return self.lines[line][1].index(name) * (WIDTH + _GAP), self.tops[line]

    @property
    def right(self) -> float:
        """The right edge of the widest line of boxes."""
        return self.columns * (WIDTH + _GAP) - _GAP

    def lanes(self, side: str) -> float:
        """Return the total width of the lanes on one side, ``"left"`` or ``"right"``."""
        return _LANE * sum(1 for place, _ in self._lanes if place == side)

    def _height(self, channel: int, owner: Any) -> float:
        return self.tops[channel] + HEIGHT + _PAD + _TRACK * self._tracks[channel, owner]

    def _lane_at(self, side: str, owner: Any) -> float:
        count = sum(1 for place, _ in self._lanes if place == side)
        outwards = _LANE * (count - self._lanes[side, owner])
        return self.right + outwards if side == "right" else -outwards

    def way(self, before: str, behind: str) -> list[Point]:
        """Return the points of the connection from the box of layer ``before`` to the box of layer ``behind``."""
        x, y = self.corner(before)
        to_x, to_y = self.corner(behind)
        first = self._line_of[before]
        last = self._line_of[behind]
        if first == last:
            return [(x + WIDTH, y + HEIGHT / 2), (to_x, to_y + HEIGHT / 2)]
        out = x + 0.7 * WIDTH
        into = to_x + self.entry(before, behind)[0]
        track = self._height(first, before)
        if last == first + 1:
            return [(out, y + HEIGHT), (out, track), (into, track), (into, to_y)]
        lane = self._lane_at("right", before)
        last_track = self._height(last - 1, before)
        return [(out, y + HEIGHT), (out, track), (lane, track), (lane, last_track), (into, last_track), (into, to_y)]

    def entry(self, before: str, behind: str) -> tuple[float, int]:
        """Return where the connection from ``before`` enters the box of ``behind`` from above.

        The result is the distance from the left edge of the box, and the index among the box's entries from the left.
        """
        sources = self._entries[behind]
        number = sources.index(before)
        return WIDTH * (0.3 + 0.5 * number / max(1, len(sources) - 1)) if len(sources) > 1 else 0.38 * WIDTH, number

    def num_entries(self, name: str) -> int:
        """Return the number of connections that enter a layer's box from above."""
        return len(self._entries[name])

    def tie(self, layers: Sequence[str], tie: Any) -> tuple[list[Point], list[list[Point]]]:
        """Return the connection of tied layers: the ends of its vertical part, and a path from there to each layer."""
        lane = self._lane_at("left", tie)
        ways = []
        for name in layers:
            x, y = self.corner(name)
            height = self._height(self._line_of[name], ("tie", tie))
            ways.append([(lane, height), (x + 0.18 * WIDTH, height), (x + 0.18 * WIDTH, y + HEIGHT)])
        heights = [way[0][1] for way in ways]
        return [(lane, min(heights)), (lane, max(heights))], ways
