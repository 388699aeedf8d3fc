"""`Partition`: the stages, what each costs, and why they cannot be better."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

from pipesched.errors import ScheduleError
from pipesched.json_files import read_fields
from pipesched.program.checkpoint_options import Keep
from pipesched.units import quote_bytes, quote_count, quote_time

__all__ = ["Partition", "StageLayers", "StageSummary", "span", "with_class_name"]

#: The names of each stage's layers.
StageLayers = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class StageSummary:
    """One stage: its rank, its first and last layer, and how many it has.

    time_s: of forward and backward together, on its rank, with transfers that it waits for. parameter_bytes: without
    copies. activation_bytes: held for all micro-batches in flight. memory_bytes: these and parameters with copies.
    bytes_in, bytes_out: over its two cuts, forward. num_parameters: 0 where layers do not say how many they have.
    num_recomputed, num_offloaded: layers whose activations are not held.
    """

    rank: int
    first: Any
    last: Any
    num_layers: int
    time_s: float
    parameter_bytes: int
    activation_bytes: int
    memory_bytes: int
    bytes_in: int
    bytes_out: int
    num_parameters: int = 0
    num_recomputed: int = 0
    num_offloaded: int = 0


@dataclass(frozen=True)
class Partition:
    """Layers by stage, in an order in which they can run.

    bottleneck_s: the time of the slowest stage, rank or cut. lower_bound_s: what no partition can beat; where it is
    the bottleneck, that is proved to be the best. ranks: of each stage. reason: why it cannot be better. ideals: how
    many order ideals were searched, 0 for a chain or single orders; probes: how often they, or chains, were gone
    through. checkpoint: layers whose activations are not held, and what is done with them.
    """

    stages: list[list[Any]]
    bottleneck_s: float
    lower_bound_s: float
    ranks: tuple[int, ...] = ()
    summaries: tuple[StageSummary, ...] = ()
    bottleneck: str = ""
    reason: str = ""
    ideals: int = 0
    probes: int = 0
    checkpoint: dict[Any, Keep] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How far the bottleneck may be above the best: 0.02 for at most 2 %."""
        return self.bottleneck_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    @property
    def proved(self) -> bool:
        """Whether no partition has a smaller bottleneck."""
        return self.bottleneck_s <= self.lower_bound_s

    @property
    def is_summarised(self) -> bool:
        """Whether the summaries can be those of these stages."""
        seen = [(own.first, own.last, own.num_layers) for own in self.summaries]
        return seen in ([], [(layers[0], layers[-1], len(layers)) for layers in self.stages if layers])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them, without the stages' layers."""
        return {name: value for name, value in asdict(self).items() if name != "stages"} | {"ranks": list(self.ranks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Partition":
        """The inverse of ``to_dict``, with ``stages``. Raises ScheduleError for what is none."""

        def summaries(rows: Any) -> tuple[StageSummary, ...]:
            return tuple(read_fields(StageSummary, row, "the summary of a stage has") for row in rows)

        made = read_fields(cls, values, "a partition has", summaries=summaries)
        if len(made.summaries) not in (0, len(made.stages)):
            raise ScheduleError(
                f"a partition has a summary of each stage, or none; got {len(made.summaries)} for {len(made.stages)} "
                f"stages; save it again"
            )
        return made

    def explain(self) -> str:
        """A table, a stage a row, then the bottleneck, and why it cannot be better."""
        rows = [_HEAD, *(_row(stage, summary) for stage, summary in enumerate(self.summaries))]
        verdict = "the best there is" if self.proved else f"at most {self.gap:.1%} above the best"
        lines = [
            *_aligned(rows),
            f"bottleneck: {self.bottleneck}, {quote_time(self.bottleneck_s)}: {verdict}",
            "why: " + self.reason.replace("; ", ";\n     "),
        ]
        return "\n".join(lines)

    __str__ = explain

    def with_class_names(self, classes: Mapping[Any, str]) -> "Partition":
        """The same partition with class names behind the names of layers, for display: ``3 Block``."""
        if not classes:
            return self

        def named(text: str) -> str:
            for layers in self.stages:
                text = text.replace(f"({span(layers)})", f"({span([with_class_name(own, classes) for own in layers])})")
            return re.sub(r"\blayer ([^\s,;:]+)", lambda own: f"layer {with_class_name(own[1], classes)}", text)

        summaries = tuple(
            replace(own, first=with_class_name(own.first, classes), last=with_class_name(own.last, classes))
            for own in self.summaries
        )
        return replace(self, summaries=summaries, bottleneck=named(self.bottleneck), reason=named(self.reason))


_HEAD = ("stage", "rank", "layers", "first .. last", "time", "parameters", "activations", "memory", "in", "out")
_LEFT = ("first .. last",)


def _row(stage: int, summary: StageSummary) -> tuple[str, ...]:
    count = f"{quote_count(summary.num_parameters)}, " if summary.num_parameters else ""
    return (
        str(stage),
        str(summary.rank),
        _number_of_layers(summary),
        span([summary.first, summary.last]),
        quote_time(summary.time_s),
        count + quote_bytes(summary.parameter_bytes),
        quote_bytes(summary.activation_bytes),
        quote_bytes(summary.memory_bytes),
        quote_bytes(summary.bytes_in),
        quote_bytes(summary.bytes_out),
    )


def _number_of_layers(summary: StageSummary) -> str:
    given_up = [(summary.num_recomputed, "recomputed"), (summary.num_offloaded, "offloaded")]
    of_them = ", ".join(f"{count} {how}" for count, how in given_up if count)
    return f"{summary.num_layers} ({of_them})" if of_them else str(summary.num_layers)


def span(layers: Sequence[Any]) -> str:
    """The first and the last of a stage's layers."""
    return f"{layers[0]} .. {layers[-1]}" if layers[0] != layers[-1] else str(layers[0])


def with_class_name(layer: Any, classes: Mapping[Any, str]) -> Any:
    """The layer's name with its class behind it, if that is known: ``3 Block``."""
    return f"{layer} {classes[layer]}" if layer in classes else layer


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    sides: list[Callable[[str, int], str]] = [str.ljust if name in _LEFT else str.rjust for name in _HEAD]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]
