"""`Partition`: the stages of a model, their costs, and why no other partition is faster."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

from pipesched.errors import ScheduleError
from pipesched.json_files import read_fields
from pipesched.program.checkpoint_options import LayerCheckpoint
from pipesched.units import counted, quote_bytes, quote_count, quote_time

__all__ = ["Partition", "StageLayers", "StageSummary", "span", "with_class_name"]

#: The names of each stage's layers.
StageLayers = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class StageSummary:
    """The time and memory of one stage of a partition."""

    rank: int
    #: The first layer.
    first: Any
    #: The last layer.
    last: Any
    num_layers: int
    #: The time of a micro-batch's forward and backward on this rank, including transfers that the stage waits for.
    time_s: float
    #: The size of the parameters in bytes, excluding gradients and optimizer state.
    parameter_bytes: int
    #: The size of the activations of all micro-batches in flight, in bytes.
    activation_bytes: int
    #: The size of activations, parameters, gradients and optimizer state, in bytes. If the search chose layers to
    #: recompute or offload, also the largest transient memory of a layer.
    memory_bytes: int
    #: The number of bytes that enter the stage in the forward of a micro-batch.
    bytes_in: int
    #: The number of bytes that leave the stage in the forward of a micro-batch.
    bytes_out: int
    #: The number of parameters; 0 if the graph has no ``num_parameters``.
    num_parameters: int = 0
    num_recomputed: int = 0
    num_offloaded: int = 0


@dataclass(frozen=True)
class Partition:
    """The result of `partition`: the layers of each stage, with the time and memory of the stages.

    ``print(partition)`` shows a table of the stages, and explains why no other partition is faster.
    """

    #: The layers of each stage, in an order in which they can run.
    stages: list[list[Any]]
    #: The time of the slowest stage, rank or cut.
    bottleneck_s: float
    #: A lower bound on the bottleneck of every partition. If it equals ``bottleneck_s``, this partition is optimal.
    lower_bound_s: float
    #: The rank of each stage.
    ranks: tuple[int, ...] = ()
    #: The time and memory of each stage.
    summaries: tuple[StageSummary, ...] = ()
    #: A description of the slowest stage, rank or cut.
    bottleneck: str = ""
    #: Why no other partition is faster, or how much faster another partition could be.
    reason: str = ""
    #: The number of order ideals searched; 0 if single orders of the layers were searched.
    ideals: int = 0
    #: The number of bounds for which the search looked for a partition.
    probes: int = 0
    #: The layers whose activations are recomputed or offloaded.
    checkpoint: dict[Any, LayerCheckpoint] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """An upper bound on how far the bottleneck is above the optimum, as a fraction: 0.02 is 2 %."""
        return self.bottleneck_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    @property
    def proved(self) -> bool:
        """Whether it is proved that no other partition has a smaller bottleneck."""
        return self.bottleneck_s <= self.lower_bound_s

    @property
    def is_summarised(self) -> bool:
        """Whether the summaries match the stages. Also True for a partition without summaries."""
        seen = [(stage.first, stage.last, stage.num_layers) for stage in self.summaries]
        return seen in ([], [(layers[0], layers[-1], len(layers)) for layers in self.stages if layers])

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON. ``stages`` is left out."""
        return {name: value for name, value in asdict(self).items() if name != "stages"} | {"ranks": list(self.ranks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Partition":
        """Create a partition from the dict that ``to_dict`` returned, after ``stages`` has been added to the dict.

        Raises ScheduleError for invalid values.
        """

        def summaries(rows: Any) -> tuple[StageSummary, ...]:
            return tuple(read_fields(StageSummary, row, "the summary of a stage must have") for row in rows)

        made = read_fields(cls, values, "a partition must have", summaries=summaries)
        if len(made.summaries) not in (0, len(made.stages)):
            raise ScheduleError(
                f"a partition must have a summary of every stage, or no summaries; got "
                f"{counted(len(made.summaries), 'summary')} for {counted(len(made.stages), 'stage')}; save the "
                f"partition again"
            )
        return made

    def explain(self) -> str:
        """Return text: a table of the stages, the bottleneck, and why no other partition is faster."""
        verdict = "optimal" if self.proved else f"at most {self.gap:.1%} above the optimum"
        lines = [
            *self.stage_lines(),
            f"bottleneck: {self.bottleneck}, {quote_time(self.bottleneck_s)}: {verdict}",
            "why: " + self.reason.replace("; ", ";\n     "),
        ]
        return "\n".join(lines)

    @property
    def verdict(self) -> str:
        """A sentence with the slowest stage, rank or cut, and why no other partition is faster."""
        split = "this split is optimal" if self.proved else f"this split is at most {self.gap:.1%} above the optimum"
        return f"bottleneck: {self.bottleneck}, {quote_time(self.bottleneck_s)} per micro-batch; {split}: {self.reason}"

    def stage_lines(self, times_s: Sequence[float] = (), rank_bytes: Sequence[int] = ()) -> list[str]:
        """Return the lines of a table of the stages.

        Args:
            times_s: the time of a forward and a backward of each stage. Default: the times of the summaries.
            rank_bytes: the memory of each rank, known from a simulation of the step, for the column ``rank memory``.
                Default: the columns ``activations`` and ``memory`` of the summaries.

        """
        rows = [dict(zip(_HEAD, _row(stage, summary), strict=True)) for stage, summary in enumerate(self.summaries)]
        head: Sequence[str] = _HEAD
        for row, time_s in zip(rows, times_s, strict=False):
            row["time"] = quote_time(time_s)
        if rank_bytes:
            head = [name if name != "memory" else "rank memory" for name in _HEAD if name != "activations"]
            for row, summary in zip(rows, self.summaries, strict=True):
                row["rank memory"] = quote_bytes(rank_bytes[summary.rank])
        return _aligned([tuple(head), *(tuple(row[name] for name in head) for row in rows)])

    __str__ = explain

    def with_class_names(self, classes: Mapping[Any, str]) -> "Partition":
        """Return a copy for display, with each layer's class name after its name: ``3 Block``."""
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
    """Return the first and the last layer of a stage, as text."""
    return f"{layers[0]} .. {layers[-1]}" if layers[0] != layers[-1] else str(layers[0])


def with_class_name(layer: Any, classes: Mapping[Any, str]) -> Any:
    """Return the layer's name, followed by its class name if ``classes`` contains the layer: ``3 Block``."""
    return f"{layer} {classes[layer]}" if layer in classes else layer


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    sides: list[Callable[[str, int], str]] = [str.ljust if name in _LEFT else str.rjust for name in rows[0]]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]
