"""Step log: prints a line for each training step, and writes scalars for TensorBoard."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    """The part of torch.utils.tensorboard.SummaryWriter that the log uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write a scalar under a tag, for one step."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The times and the loss of one step, as logged."""

    step: int
    step_s: float  #: the measured step time in seconds
    bubble_ratio: float
    busy: tuple[float, ...]  #: for each rank, the fraction of the makespan in which the rank computes
    loss: float | None = None  #: the loss of the step; None if unknown
    predicted_s: float | None = None  #: the predicted step time in seconds; None if unknown
    #: The mean time in seconds from one step to the next, including all other code of the training loop. None in the
    #: first logged step.
    whole_s: float | None = None
    tokens_per_s: float | None = None  #: None without ``tokens=``, and in the first logged step
    metrics: Mapping[str, float] = field(default_factory=dict)  #: the values of ``pipe.metrics``

    @property
    def scalars(self) -> dict[str, float]:
        """The logged values, keyed by TensorBoard tag such as ``pipesched/step_s``; unknown values are left out."""
        named = {name: value for name, value in vars(self).items() if name not in ("step", "busy", "metrics")}
        named |= {f"metrics/{name}": value for name, value in self.metrics.items()}
        named |= {f"busy/rank_{rank}": share for rank, share in enumerate(self.busy)}
        return {f"pipesched/{name}": value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        shown = {} if self.loss is None else {"loss": self.loss}
        values = "".join(f"{name} {value:.4g}, " for name, value in {**shown, **self.metrics}.items())
        predicted = ""
        if self.predicted_s:
            off = quote_off(Pair(self.predicted_s, self.step_s).off)
            predicted = f" ({off} compared to {quote_time(self.predicted_s)} predicted)"
        whole = "" if self.whole_s is None else f", one step every {quote_time(self.whole_s)}"
        whole += "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} tokens/s"
        busy = " ".join(f"{share:.0%}" for share in self.busy)
        return (
            f"step {self.step}: {values}{quote_time(self.step_s)}{predicted}{whole}, bubble {self.bubble_ratio:.1%}, "
            f"busy {busy}"
        )


class StepLog:
    """Logs training steps: prints a line for each step, and writes scalars for TensorBoard.

    ::

        log = StepLog(pipe, SummaryWriter(), every=10)
        for x, y in loader:
            log(pipe.step(x, target=y))

    For each logged step, the StepLog reads the measured trace and simulates a step for comparison. On a GPU, reading
    the trace waits for the step to end. Steps that are not logged add no overhead. Under a mesh, every rank must call
    the StepLog, and rank 0 logs the times of all ranks of its replica.

    Args:
        pipe: the pipeline to log.
        writer: a torch.utils.tensorboard.SummaryWriter, or any object with the same ``add_scalar`` method. Default:
            None (no scalars).
        every: the number of steps from one logged step to the next. Default: 1 (log every step).
        tokens: the number of tokens in a step, to log tokens per second. Default: None (not logged).
        show: a function that is called with each line; None prints nothing. Default: print.

    Raises:
        InputError: an argument has the wrong type or value.

    """

    def __init__(
        self,
        pipe: Pipeline,
        writer: _Writer | None = None,
        *,
        every: int = 1,
        tokens: int | None = None,
        show: Callable[[str], Any] | None = print,
    ) -> None:
        check_type(pipe, Pipeline, "pipe must be a Pipeline", "pass the pipeline to log")
        if not is_count(every):
            raise InputError(f"every= must be a whole number of steps, at least 1; got {shown(every)}; pass 1 or more")
        if tokens is not None and not is_count(tokens):
            raise InputError(
                f"tokens= must be the number of tokens in a step, at least 1; got {shown(tokens)}; pass the number of "
                f"rows in a step times the sequence length"
            )
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise InputError(
                f"writer= must have a method add_scalar; got {shown(writer)}; pass TensorBoard's SummaryWriter"
            )
        if show is not None and not callable(show):
            raise InputError(f"show= must be a function that takes a string; got {shown(show)}; pass print, or None")
        self._pipe = pipe
        self._writer = writer
        self._every = every
        self._tokens = tokens
        self._show = show
        self._calls = 0
        self._last: tuple[int, float] | None = None  # (number of calls, time in s) at the last logged step

    def __call__(self, loss: Any = None, *, step: int | None = None) -> StepFigures | None:
        """Log the step that has just run.

        Args:
            loss: the loss of the step, a number or a tensor. Default: None (no loss is logged).
            step: the number of the step. Default: the number of earlier calls.

        Returns:
            The logged values; None if this step is not logged, or if this rank does not log.

        """
        self._calls += 1
        if self._calls % self._every:
            return None
        trace = self._pipe._history.gather_trace()
        now = self._calls, time.perf_counter()
        last = self._last
        self._last = now
        grid = self._pipe._running.host.grid
        if trace is None or not grid.holds(0) or grid.replica or grid.plane:
            return None
        predicted = self._pipe.predicted
        as_predicted = sum(map(len, predicted.by_rank)) == sum(map(len, trace.by_rank))
        whole_s = None if last is None else (now[1] - last[1]) / (now[0] - last[0])
        figures = StepFigures(
            step=self._calls - 1 if step is None else step,
            step_s=trace.makespan_s / _num_steps(trace, self._pipe.num_microbatches),
            bubble_ratio=trace.bubble_ratio,
            busy=trace.busy_ratios,
            loss=None if loss is None else float(loss),
            predicted_s=predicted.makespan_s if as_predicted else None,
            whole_s=whole_s,
            tokens_per_s=None if self._tokens is None or whole_s is None else self._tokens / whole_s,
            metrics={name: float(value) for name, value in self._pipe.metrics.items()},
        )
        if self._writer is not None:
            for name, value in figures.scalars.items():
                self._writer.add_scalar(name, value, figures.step)
        if self._show is not None:
            self._show(str(figures))
        return figures


def _num_steps(trace: Trace, num_microbatches: int) -> int:
    """Return the number of steps in a trace, which can be above 1 if the schedule is asynchronous."""
    run = {span.action.microbatch for row in trace.by_rank for span in row if span.action.kind is Kind.F}
    return max(1, round(len(run) / num_microbatches))
