"""Step log: a line about each training step, and scalars for TensorBoard."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pipesched.checks import check_type, is_count, shown
from pipesched.errors import InputError
from pipesched.pipeline.pipeline import Pipeline
from pipesched.program.actions import Kind
from pipesched.simulation.comparison import Pair, quote_off
from pipesched.simulation.trace import Trace
from pipesched.units import quote_time

__all__ = ["StepFigures", "StepLog"]


class _Writer(Protocol):
    """As torch.utils.tensorboard.SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Keep one number."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The figures of one step.

    step_s: its makespan. busy: of each rank, the share of the makespan in which it computes. whole_s: the time from one
    step to the next, with everything between. None: not known.
    """

    step: int
    step_s: float
    bubble_ratio: float
    busy: tuple[float, ...]
    loss: float | None = None
    predicted_s: float | None = None
    whole_s: float | None = None

    @property
    def scalars(self) -> dict[str, float]:
        """The figures by name, as a writer gets them."""
        named = {name: value for name, value in vars(self).items() if name not in ("step", "busy")}
        named |= {f"busy/rank_{rank}": share for rank, share in enumerate(self.busy)}
        return {f"pipesched/{name}": value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        """One line."""
        loss = "" if self.loss is None else f"loss {self.loss:.4g}, "
        predicted = ""
        if self.predicted_s:
            off = quote_off(Pair(self.predicted_s, self.step_s).off)
            predicted = f" ({off} on {quote_time(self.predicted_s)} predicted)"
        whole = "" if self.whole_s is None else f", {quote_time(self.whole_s)} with all between"
        busy = " ".join(f"{share:.0%}" for share in self.busy)
        return (
            f"step {self.step}: {loss}{quote_time(self.step_s)}{predicted}{whole}, bubble {self.bubble_ratio:.1%}, "
            f"busy {busy}"
        )


class StepLog:
    """Logs steps. Call it after each step: ``log = StepLog(pipe)``, then ``log(loss)``.

    writer: gets the scalars: a torch.utils.tensorboard.SummaryWriter, or any object with its add_scalar; None: nobody.
    show: gets a line; None: nobody. every: log one of so many steps; the others cost nothing. For a step that is logged
    the trace is read, on a GPU when the step has ended, and the step is simulated. Under a mesh every rank calls the
    log, ranks send rank 0 their times, and rank 0 logs them. Raises InputError where ``every`` is no whole number.
    """

    def __init__(
        self,
        pipe: Pipeline,
        writer: _Writer | None = None,
        *,
        every: int = 1,
        show: Callable[[str], Any] | None = print,
    ) -> None:
        check_type(pipe, Pipeline, "pipe is a Pipeline", "pass the one whose steps are to be said")
        if not is_count(every):
            raise InputError(f"every is a whole number of steps, at least 1; got {shown(every)}; pass 1 or more")
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise InputError(f"a writer has add_scalar; got {shown(writer)}; pass such as TensorBoard's SummaryWriter")
        if show is not None and not callable(show):
            raise InputError(f"show is called with each line; got {shown(show)}; pass such as print, or None")
        self._pipe = pipe
        self._writer = writer
        self._every = every
        self._show = show
        self._calls = 0
        self._last: tuple[int, float] | None = None  # the calls up to the last one that was logged, and its time

    def __call__(self, loss: Any = None, *, step: int | None = None) -> StepFigures | None:
        """After a step. loss: its loss, a number or a tensor. step: its number; default: counted from 0.

        Returns the figures that were logged; None where none were.
        """
        self._calls += 1
        if self._calls % self._every:
            return None
        trace = self._pipe._history.gather_trace()
        now = self._calls, time.perf_counter()
        last = self._last
        self._last = now
        if trace is None or not self._pipe._running.host.holds(0):
            return None
        predicted = self._pipe.predicted
        as_predicted = sum(map(len, predicted.by_rank)) == sum(map(len, trace.by_rank))
        figures = StepFigures(
            step=self._calls - 1 if step is None else step,
            step_s=trace.makespan_s / _num_steps(trace, self._pipe.num_microbatches),
            bubble_ratio=trace.bubble_ratio,
            busy=trace.busy_ratios,
            loss=None if loss is None else float(loss),
            predicted_s=predicted.makespan_s if as_predicted else None,
            whole_s=None if last is None else (now[1] - last[1]) / (now[0] - last[0]),
        )
        if self._writer is not None:
            for name, value in figures.scalars.items():
                self._writer.add_scalar(name, value, figures.step)
        if self._show is not None:
            self._show(str(figures))
        return figures


def _num_steps(trace: Trace, num_microbatches: int) -> int:
    """How many steps a trace has: several where the schedule is asynchronous."""
    run = {span.action.microbatch for row in trace.by_rank for span in row if span.action.kind is Kind.F}
    return max(1, round(len(run) / num_microbatches))
