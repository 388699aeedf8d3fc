"""Step log: what a step took while training goes on: a line, and scalars for TensorBoard."""

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


@dataclass(frozen=True)
class StepFigures:
    """What one step took. step_s: its makespan. whole_s: from one step to the next, with all that lies between.

    busy: of each rank, the share of the makespan in which it computes. None: not known.
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
        named = {
            "loss": self.loss,
            "step_s": self.step_s,
            "predicted_s": self.predicted_s,
            "whole_s": self.whole_s,
            "bubble_ratio": self.bubble_ratio,
            **{f"busy/rank_{rank}": share for rank, share in enumerate(self.busy)},
        }
        return {f"pipesched/{name}": value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        """One line."""
        loss = [] if self.loss is None else [f"loss {self.loss:.4g}"]
        took = quote_time(self.step_s)
        if self.predicted_s:
            off = quote_off(Pair(self.predicted_s, self.step_s).off)
            took += f" ({off} on {quote_time(self.predicted_s)} predicted)"
        whole = [] if self.whole_s is None else [f"{quote_time(self.whole_s)} with all between"]
        busy = "busy " + " ".join(f"{share:.0%}" for share in self.busy)
        return f"step {self.step}: " + ", ".join([*loss, took, *whole, f"bubble {self.bubble_ratio:.1%}", busy])


class StepLog:
    """Says what steps took. Call it behind each step: ``log = StepLog(pipe)``, then ``log(loss)``.

    writer: gets the scalars, where there is one: a torch.utils.tensorboard.SummaryWriter, or whatever has its
    add_scalar. show: gets a line; None shows none. every: one of so many steps is said; the others cost nothing. Where
    one is, its trace is read, on a GPU when the step has ended, and the step simulated. Under a mesh every rank calls
    it, ranks send rank 0 their times, and rank 0 says them. Raises InputError where ``every`` is no whole number.
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
        self._pipe, self._writer, self._every, self._show = pipe, writer, every, show
        self._calls = 0
        self._said: tuple[int, float] | None = None

    def __call__(self, loss: Any = None, *, step: int | None = None) -> StepFigures | None:
        """After a step. loss: its loss, a number or a tensor. step: its number; counted from 0 unless given.

        Returns the figures that were said; None where none were.
        """
        self._calls += 1
        if self._calls % self._every:
            return None
        trace, now_s = self._pipe.gather_trace(), time.perf_counter()
        said, self._said = self._said, (self._calls, now_s)
        if trace is None or not self._pipe._running.host.holds(0):
            return None
        steps = _steps(trace, self._pipe.num_microbatches)
        predicted = self._pipe.predicted
        figures = StepFigures(
            step=self._calls - 1 if step is None else step,
            step_s=trace.makespan_s / steps,
            bubble_ratio=trace.bubble_ratio,
            busy=tuple(busy_s / trace.makespan_s if trace.makespan_s else 0.0 for busy_s in trace.busy_s),
            loss=None if loss is None else float(loss),
            predicted_s=predicted.makespan_s if _actions(predicted) == _actions(trace) else None,
            whole_s=None if said is None else (now_s - said[1]) / (self._calls - said[0]),
        )
        if self._writer is not None:
            for name, value in figures.scalars.items():
                self._writer.add_scalar(name, value, figures.step)
        if self._show is not None:
            self._show(str(figures))
        return figures


def _steps(trace: Trace, num_microbatches: int) -> int:
    """How many steps a trace has: of an asynchronous schedule several, which run on into each other."""
    run = {span.action.microbatch for row in trace.by_rank for span in row if span.action.kind is Kind.F}
    return max(1, round(len(run) / num_microbatches))


def _actions(trace: Trace) -> int:
    return sum(map(len, trace.by_rank))
