"""Alternatives: summaries of the plans that a search compared, for tables and saved plans."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipesched.checks import check_number
from pipesched.json_files import read_fields

__all__ = ["Alternative", "fastest", "taken"]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The summary of a plan that the search considered."""

    #: The name of the plan in tables: the schedule and the number of chunks; for a baseline, "one device" or "equal
    #: split".
    label: str
    schedule: str
    num_ranks: int
    chunks_per_rank: int
    num_microbatches: int
    #: The checkpoint setting as a short text.
    checkpoint: str
    #: Predicted step time in seconds.
    step_s: float
    #: The predicted bubble: idle time of all ranks / (number of ranks x makespan).
    bubble_ratio: float
    #: Predicted peak memory of the rank that needs the most memory. None: unknown.
    peak_bytes: int | None = None
    #: Memory limit of the rank that needs the most memory. None: unknown.
    limit_bytes: int | None = None
    #: Measured step time in seconds, the median over several steps. None: the plan did not run.
    measured_s: float | None = None
    #: Step time in seconds, predicted before measured steps corrected the costs. None: the plan did not run.
    first_s: float | None = None
    #: The number of replicas, each with ``num_ranks`` ranks or tensor groups. None: replicas were not considered.
    num_replicas: int | None = None
    #: The value of ``zero=``. None: replicas were not considered.
    zero: int | None = None
    #: The number of ranks that split each layer. None: layers are not split.
    tensor_size: int | None = None
    #: How these ranks divide matrices, such as "3d (4 x 4 x 4)". "": in one dimension.
    tensor_layout: str = ""
    #: Why the plan was not chosen; "" for the chosen plan.
    note: str = ""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None or name in ("step_s", "bubble_ratio"):
                check_number(value, f"{name} of the alternative {self.label!r}")

    @property
    def fits(self) -> bool:
        """Whether the rank with the highest peak memory stays within its limit; True if peak or limit is unknown."""
        return self.peak_bytes is None or self.limit_bytes is None or self.peak_bytes <= self.limit_bytes

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON, omitting fields whose value is unknown."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Alternative":
        """Create an alternative from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""
        return read_fields(
            cls, {"checkpoint": "", **values} if isinstance(values, Mapping) else values, "an alternative must have"
        )


def taken(alternatives: Iterable[Alternative]) -> Alternative | None:
    """Return the chosen alternative, which is the alternative without a note; None if every alternative has a note."""
    return next((alternative for alternative in alternatives if not alternative.note), None)


def fastest(alternatives: Iterable[Alternative], label: str) -> Alternative | None:
    """Return the fastest alternative with this label; None if no alternative has this label."""
    labelled = (alternative for alternative in alternatives if alternative.label == label)
    return min(labelled, key=lambda alternative: alternative.step_s, default=None)


_NUMBERS = (
    "step_s",
    "bubble_ratio",
    "peak_bytes",
    "limit_bytes",
    "measured_s",
    "first_s",
    "num_replicas",
    "zero",
    "tensor_size",
)
