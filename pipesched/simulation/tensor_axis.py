"""Tensor axis: the number of ranks that split each layer, and whether they also divide the sequence."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipesched.checks import check_type, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import read_fields

__all__ = ["TensorAxis"]


@dataclass(frozen=True, kw_only=True)
class TensorAxis:
    """The ranks that split each layer. They have consecutive numbers, and each host has consecutive ranks.

    Attributes:
        size: the number of ranks in a tensor group.
        sequence_parallel: whether the ranks also divide what lies between the split parts, along the sequence: norms,
            dropouts, residual sums, and the tensors that stages send each other (Korthikanti et al. 2022,
            arXiv:2205.05198). Default: False.

    Raises:
        ScheduleError: for invalid values.

    """

    size: int
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.size):
            raise ScheduleError(
                f"the size of a tensor group must be a whole number, at least 1; got {shown(self.size)}; pass 1 or more"
            )
        check_type(self.sequence_parallel, bool, "sequence_parallel must be True or False", "pass one of them")

    def __str__(self) -> str:
        return f"tp {self.size}" + (", sequence parallel" if self.sequence_parallel else "")

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TensorAxis":
        """Make the axis from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""
        return read_fields(cls, values, "a tensor axis must have")
