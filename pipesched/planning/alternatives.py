"""Alternatives: the plans that a search weighed against the one it took, as plain numbers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipesched.checks import check_number
from pipesched.json_files import read_fields

__all__ = ["Alternative"]


@dataclass(frozen=True)
class Alternative:
    """A plan that could have been taken. label: what it is called; of the baselines "one device" and "equal split".

    step_s: predicted seconds of a step; bubble_ratio: of the ranks' time in it. peak_bytes: of the largest rank, where
    layers' sizes are known; limit_bytes: what that rank may hold. measured_s: seconds of a step, where it was run, the
    median of several; first_s: those that had been predicted before the steps that ran corrected the costs.
    checkpoint: in a few words. note: why it was not taken; "" of the plan itself.
    """

    label: str
    schedule: str
    num_ranks: int
    chunks_per_rank: int
    num_microbatches: int
    checkpoint: str
    step_s: float
    bubble_ratio: float
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    measured_s: float | None = None
    first_s: float | None = None
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
        return read_fields(cls, {"checkpoint": "", **values} if isinstance(values, Mapping) else values, _HAS)


_HAS = "an alternative has"
_NUMBERS = ("step_s", "bubble_ratio", "peak_bytes", "limit_bytes", "measured_s", "first_s")
