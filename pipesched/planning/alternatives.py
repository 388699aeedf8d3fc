"""Alternatives: the plans that a search weighed against the one it took, as plain numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipesched.checks import check_number
from pipesched.json_files import read_fields

__all__ = ["Alternative", "fastest", "taken"]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A plan that could have been taken."""

    #: What it is called; of the baselines "one device" and "equal split".
    label: str
    schedule: str
    num_ranks: int
    chunks_per_rank: int
    num_microbatches: int
    #: In a few words.
    checkpoint: str
    #: Predicted seconds of a step.
    step_s: float
    #: The idle share of the ranks' time in it.
    bubble_ratio: float
    #: What the largest rank needs, where layers' sizes are known, and what that rank may hold.
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    #: Seconds of a step, where it was run: the median of several.
    measured_s: float | None = None
    #: Seconds that had been predicted before the steps that ran corrected the costs.
    first_s: float | None = None
    #: Why it was not taken; "" of the plan itself.
    note: str = ""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None or name in ("step_s", "bubble_ratio"):
                check_number(value, f"{name} of the alternative {self.label!r}")

    @property
    def fits(self) -> bool:
        """Whether the largest rank stays within what it may hold, as far as both are known."""
        return self.peak_bytes is None or self.limit_bytes is None or self.peak_bytes <= self.limit_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON takes them; what is not known is left out."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Alternative":
        """The inverse of ``to_dict``. Raises ScheduleError for what is none."""
        return read_fields(
            cls, {"checkpoint": "", **values} if isinstance(values, Mapping) else values, "an alternative has"
        )


def taken(alternatives: Iterable[Alternative]) -> Alternative | None:
    """The plan itself among what it was weighed against."""
    return next((own for own in alternatives if not own.note), None)


def fastest(alternatives: Iterable[Alternative], label: str) -> Alternative | None:
    """The fastest with this label: a baseline may have several schedules."""
    return min((own for own in alternatives if own.label == label), key=lambda own: own.step_s, default=None)


_NUMBERS = ("step_s", "bubble_ratio", "peak_bytes", "limit_bytes", "measured_s", "first_s")
