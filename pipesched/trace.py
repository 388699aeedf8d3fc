"""Trace: what ran when. One type for predicted and for measured time."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from pipesched.actions import KINDS, Action, Holding, Kind, Lane
from pipesched.costs import Costs
from pipesched.validation import in_flight_steps, peak_in_flight

__all__ = ["Span", "Trace"]


class Span(NamedTuple):
    """One action's time on one rank, in seconds."""

    action: Action
    rank: int
    start_s: float
    end_s: float
    lane: Lane


@dataclass(frozen=True)
class Trace:
    """The spans of one step. Only compute spans count for times and bubble.

    costs: what the step was simulated with, or the sizes that its stages hold: needed for bytes.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    name: str = ""
    costs: Costs | None = None

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """Each rank's compute spans in time order."""
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            if span.lane is Lane.COMPUTE:
                rows[span.rank].append(span)
        return tuple(tuple(sorted(row, key=lambda span: (span.start_s, span.end_s))) for row in rows)

    @property
    def start_s(self) -> float:
        """The first start over all ranks."""
        return min((row[0].start_s for row in self.by_rank if row), default=0)

    @property
    def makespan_s(self) -> float:
        """Last end minus first start over all ranks: what one isolated step takes."""
        return max((row[-1].end_s for row in self.by_rank if row), default=0) - self.start_s

    @property
    def span_s(self) -> float:
        """The longest of the ranks' own last end minus first start: what the zero-bubble papers call cost."""
        return max((row[-1].end_s - row[0].start_s for row in self.by_rank if row), default=0)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(span.end_s - span.start_s for span in row) for row in self.by_rank)

    @property
    def bubble_ratio(self) -> float:
        """Idle time over (ranks x makespan): 1F1B with uniform costs gives (p-1)/(m+p-1)."""
        whole = self.num_ranks * self.makespan_s
        return 1 - sum(self.busy_s) / whole if whole else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most (stage, micro-batch) pairs that each rank holds at once."""
        return tuple(peak_in_flight(span.action for span in row) for row in self.by_rank)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes of activations, inputs and held weight-gradient work that each rank has at once."""
        return tuple(max((held for _, held in self.memory(rank)), default=0) for rank in range(self.num_ranks))

    def in_flight(self, rank: int) -> Iterator[tuple[float, int]]:
        """One rank's (stage, micro-batch) pairs over time: (time in seconds, pairs from then on)."""
        row = self.by_rank[rank]
        for span, (_, held, after) in zip(row, in_flight_steps(span.action for span in row), strict=True):
            yield span.start_s, held
            yield span.end_s, after

    def memory(self, rank: int) -> Iterator[tuple[float, int]]:
        """One rank's held bytes over time: (time in seconds, bytes from then on)."""
        row = self.by_rank[rank]
        recomputed = {(span.action.stage, span.action.microbatch) for span in row if span.action.kind is Kind.R}
        kept = {(s.action.stage, s.action.microbatch) for s in row if Holding.WEIGHT_GRAD in KINDS[s.action.kind].gives}
        held: dict[tuple[int, int], dict[Holding, int]] = {}
        total = 0
        for span in row:
            pair = span.action.stage, span.action.microbatch
            sizes: Mapping[Holding, int] = self.costs.held_bytes(pair[0]) if self.costs else {}
            takes = KINDS[span.action.kind].takes
            if takes is Holding.ACTIVATIONS and span.action.kind is Kind.F and pair in recomputed:
                takes = Holding.INPUT
            if takes is not None:
                held.setdefault(pair, {})[takes] = sizes.get(takes, 0)
                total += sizes.get(takes, 0)
                yield span.start_s, total
            gives = KINDS[span.action.kind].gives if pair in kept else tuple(Holding)
            given = [held.get(pair, {}).pop(holding, 0) for holding in gives]
            if given:
                total -= sum(given)
                yield span.end_s, total

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as JSON takes them."""
        spans = [[str(s.action), s.rank, s.start_s, s.end_s] for s in self.spans]
        costs = self.costs.to_dict() if self.costs else None
        return {"name": self.name, "num_ranks": self.num_ranks, "costs": costs, "spans": spans}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Trace":
        """The inverse of ``to_dict``."""
        actions = [(Action.parse(text), rank, start, end) for text, rank, start, end in values["spans"]]
        spans = tuple(Span(action, rank, start, end, action.lane) for action, rank, start, end in actions)
        costs = Costs.from_dict(values["costs"]) if values.get("costs") else None
        return cls(spans, values["num_ranks"], values.get("name", ""), costs)

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """Write Chrome's trace-event JSON, which Perfetto and chrome://tracing open: a process a rank, a row a lane."""
        lanes = list(Lane)
        events: list[dict[str, Any]] = []
        for rank in range(self.num_ranks):
            events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
            events += [
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": lanes.index(lane), "args": {"name": str(lane)}}
                for lane in lanes
            ]
        for span in self.spans:
            stage, kind, microbatch, _ = span.action
            events.append(
                {
                    "ph": "X",
                    "name": str(span.action),
                    "cat": str(kind),
                    "pid": span.rank,
                    "tid": lanes.index(span.lane),
                    "ts": (span.start_s - self.start_s) * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    "args": {"stage": stage, "microbatch": microbatch},
                }
            )
        Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
