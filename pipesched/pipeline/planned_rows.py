"""Planned rows: the size of the micro-batches for which a plan was found, compared with that of the first step."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipesched.planning.plan import Plan
from pipesched.units import counted

__all__ = ["PlannedRows", "clearly_differs"]

_CLEARLY = 0.1  # a difference in rows that changes predictions more than the noise of a step


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """The number of rows of the micro-batches for which a plan was found.

    Args:
        plan: the plan, which the user gave or a search found. None: neither.
        is_given: whether the user gave the plan.
        batch_size: the number of rows that the user gave to the search. None: the search took the sample's rows as
            those of a micro-batch.

    """

    plan: Plan | None
    is_given: bool
    batch_size: int | None

    def complaint(self, rows: Sequence[int]) -> str:
        """Return a warning for a step with micro-batches of these numbers of rows; "" if the plan is for such a step.

        Also returns "" if the plan's size is not known.
        """
        planned = self.plan.microbatch_rows if self.plan is not None else None
        if planned is None or not clearly_differs(planned, rows):
            return ""
        total = sum(rows)
        if self.is_given:
            source = "plan="
            remedy = f"make a plan with pipesched.tune(..., batch_size={total}, num_microbatches={len(rows)})"
        elif self.batch_size is not None:
            source = "batch_size"
            remedy = f"pass search=Search(batch_size={total}) to Pipeline"
        else:
            source = "the rows of the sample"
            remedy = f"pass a sample of {counted(max(rows), 'row')}, or search=Search(batch_size={total}), to Pipeline"
        return (
            f"the first step must have micro-batches of the planned size; the plan was found for micro-batches of "
            f"{counted(planned, 'row')} (from {source}), but the first step has micro-batches of "
            f"{counted(max(rows), 'row')} ({counted(total, 'row')} in {counted(len(rows), 'micro-batch')}), so "
            f"predicted times and memory are for the wrong size; {remedy}"
        )


def clearly_differs(planned: int, rows: Sequence[int]) -> bool:
    """Return whether all micro-batches with these numbers of rows are clearly larger or smaller than planned."""
    return max(rows) < planned * (1 - _CLEARLY) or min(rows) > planned * (1 + _CLEARLY)
