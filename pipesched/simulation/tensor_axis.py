"""Tensor axis: the number of ranks that split each layer, how they divide it, and whether they divide the sequence."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipesched.checks import check_type, is_count, shown
from pipesched.errors import ScheduleError
from pipesched.json_files import read_fields
from pipesched.simulation.tensor_layout import TensorLayout

__all__ = ["TensorAxis"]

_ONE = TensorLayout(kind="1d", shape=(1,))


@dataclass(frozen=True, kw_only=True)
class TensorAxis:
    """The ranks that split each layer. They have consecutive numbers, and each host has consecutive ranks.

    ::

        print(TensorAxis(size=64, layout=TensorLayout.of("3d", 64)))  # tp 64 in 3d (4 x 4 x 4)

    Attributes:
        size: the number of ranks in a tensor group.
        sequence_parallel: whether the ranks also divide what lies between the split parts, along the sequence: norms,
            dropouts, residual sums, and the tensors that stages send each other (Korthikanti et al. 2022,
            arXiv:2205.05198). Only for a layout in one dimension; the other layouts always divide these parts. Default:
            False.
        layout: how the ranks divide matrices. Default: in one dimension.

    Raises:
        ScheduleError: for invalid values.

    """

    size: int
    sequence_parallel: bool = False
    layout: TensorLayout = _ONE

    def __post_init__(self) -> None:
        if not is_count(self.size):
            raise ScheduleError(
                f"the size of a tensor group must be a whole number, at least 1; got {shown(self.size)}; pass 1 or more"
            )
        check_type(self.sequence_parallel, bool, "sequence_parallel must be True or False", "pass one of them")
        check_type(self.layout, TensorLayout, "layout must be a TensorLayout", "for example, pass TensorLayout.of(...)")
        if self.layout == _ONE:
            object.__setattr__(self, "layout", TensorLayout(kind="1d", shape=(self.size,)))
        if self.layout.size != self.size:
            raise ScheduleError(
                f"the layout of a tensor group must have a place for each rank; got {self.layout} for a group of "
                f"{self.size} ranks; pass a layout for {self.size} ranks, or another size"
            )
        if self.sequence_parallel and not self.is_flat:
            raise ScheduleError(
                f"sequence_parallel is for layouts in one dimension, because the others always divide norms and "
                f"residual sums; got sequence_parallel=True with {self.layout}; leave sequence_parallel out"
            )

    @property
    def is_flat(self) -> bool:
        """Whether the ranks divide matrices in one dimension."""
        return self.layout.kind == "1d"

    def __str__(self) -> str:
        sequence = ", sequence parallel" if self.sequence_parallel else ""
        return f"tp {self.size}" + (sequence if self.is_flat else f" in {self.layout}")

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON. A layout in one dimension is left out."""
        values = asdict(self)
        if self.is_flat:
            del values["layout"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TensorAxis":
        """Make the axis from the dict that ``to_dict`` returned. Raises ScheduleError for invalid values."""
        return read_fields(cls, values, "a tensor axis must have", layout=TensorLayout.from_dict)
