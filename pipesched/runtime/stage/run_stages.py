"""Run stages: prepares the stages of this process for a run, and ends the run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pipesched.program.actions import Kind
from pipesched.program.program import Program
from pipesched.program.weight_versions import Uses
from pipesched.runtime.stage.run_parts import RunParts
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.caller_context import Caller

__all__ = ["RunStages"]

T = TypeVar("T")

_NO_UPDATES: Mapping[int, Uses] = {}


class _Copies(Protocol):
    def refresh(self) -> None:
        """Give the copies the present values of the weights. Collective."""


@dataclass(kw_only=True)
class RunStages:
    """The stages of this process in one run. An executor calls ``begin`` before the run, and ``end`` after it."""

    program: Program
    stages: Mapping[int, Stage]
    step_data: StepData
    #: For each stage that updates its weights while micro-batches are in flight: the weight versions that it uses.
    uses: Mapping[int, Uses] = field(default_factory=lambda: _NO_UPDATES)
    #: The holders of copies of weights.
    copies: Sequence[_Copies] = ()
    #: What the run needs besides its program.
    parts: RunParts = field(default_factory=RunParts)
    #: Whether the executor has begun the run. It refuses a run while another run is in progress.
    begun: bool = False

    def begin(self, caller: Caller) -> None:
        """Prepare the stages for actions with the caller's settings."""
        self.begun = True
        step_data = self.step_data
        if caller.autocasts:
            step_data.autocast = caller.autocast
        for begin in self.parts.begin:
            begin(step_data)
        for holder in self.copies:
            holder.refresh()
        for index, stage in self.stages.items():
            stage.begin(step_data, self.uses.get(index))
            divided = stage.sharded is not None or stage.divided_weights is not None
            if divided and not step_data.outside_loss and index not in self.uses:
                stage.begin_weights(_last_backward(self.program, index))

    def completed(self, run: Callable[[], T]) -> T:
        """Return the result of ``run``, in which an executor runs the stages.

        The parts then complete the run. If it fails, they undo what ``begin`` has prepared.
        """
        try:
            result = run()
            for after_run in self.parts.after_run:
                after_run(self.step_data)
        except BaseException:
            if self.begun:
                for failed in self.parts.failed:
                    failed()
            raise
        return result

    def end(self, failed: bool) -> None:
        """Release what the stages hold. ``failed`` states whether the run failed."""
        if self.step_data.copies:
            self.step_data.wait_for_copies()
        for stage in self.stages.values():
            stage.end(failed)


def _last_backward(program: Program, stage: int) -> int | None:
    """Return the micro-batch of a stage's last B or W action; None if there is no such action."""
    order = program.orders[program.placement[stage]]
    backwards = (one for one in reversed(order) if one.stage == stage and one.kind in (Kind.B, Kind.W))
    return next((one.microbatch for one in backwards), None)
