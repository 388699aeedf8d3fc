"""Run parts: what a run needs besides its program, such as late updates or the statistics of BatchNorm.

A part is made once for a plan, and takes part in every run of its kind. `RunParts` has the parts of one kind of run.
"""

from collections.abc import Callable, Iterable

from pipesched.runtime.stage.step_data import StepData

__all__ = ["RunPart", "RunParts"]


class RunPart:
    """Something that a run needs besides its program. Each method does nothing unless a part overrides it."""

    def begin(self, step_data: StepData) -> None:
        """Prepare a run. Called before the ranks start, once any earlier run has ended."""

    def after_run(self, step_data: StepData) -> None:
        """Complete the results of a run, such as gradients. Called after the ranks of this process. Collective."""

    def failed(self) -> None:
        """Undo ``begin``. Called in place of ``after_run``, or if an ``after_run`` raised an error."""

    def finish(self, step_data: StepData) -> None:
        """React to the results of a step. Called once the step counts. Collective."""


class RunParts:
    """The parts of one kind of run, such as a step. Each attribute holds the methods that a run must call, in order.

    A method that a part does not override is left out, so that a run calls nothing that does nothing.
    """

    def __init__(self, parts: Iterable[RunPart] = ()) -> None:
        every = list(parts)
        self.begin: list[Callable[[StepData], None]] = [part.begin for part in every if _overrides(part, "begin")]
        self.after_run = [part.after_run for part in every if _overrides(part, "after_run")]
        self.failed = [part.failed for part in every if _overrides(part, "failed")]
        self.finish = [part.finish for part in every if _overrides(part, "finish")]


def _overrides(part: RunPart, method: str) -> bool:
    return getattr(type(part), method) is not getattr(RunPart, method)
