"""Async steps: runs an asynchronous schedule, whose steps overlap until a flush.

Every rank receives its order for each requested step and runs it without waiting for the other ranks to finish. If all
ranks share one process, each rank is a thread, and the caller queues steps one step ahead of the threads. With one
process per rank, the calling thread runs the rank's order. Updates change the weights while micro-batches are in
flight. Each stage keeps older versions of its weights until no micro-batch needs them (PipeDream, Narayanan et al.
2019; PipeDream-2BW, 2021).
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from pipesched.devices.selection import have_accelerator
from pipesched.devices.streams import used_here
from pipesched.errors import ExecutionError
from pipesched.program.segments import Orders, Segments
from pipesched.runtime.executors.threads import RunSpec, Timeline
from pipesched.runtime.kept_batches import KeptBatches
from pipesched.runtime.microbatches import Batch, Weighting
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.runtime.stage.run_stages import RunStages
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.runtime.step_metrics import RunResults, StepMetrics
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.keyed_random import Key

__all__ = ["Stream"]

_REMEMBERED = 6  # keep the timelines of this many recent parts; a part is a step or the flush


class Stream:
    """Runs the overlapping steps of an asynchronous schedule, from the first step to the flush.

    Args:
        host: the RankHost that runs the ranks.
        segments: splits the program's orders into parts: one part for each step, and one for the flush.
        stages: the stages of this process.
        step_data: a StepData with the number of the first step, without inputs.
        caller: the settings of the calling thread, such as autocast.
        finished: called with the timeline of each part after all ranks of this process have run the part.
        metrics: receives the losses that layers add.
        kind: the kind of the runs, for `RunResults`. Layers add losses either in all runs of a kind or in none.

    Raises:
        ExecutionError: if another run is in progress.

    """

    def __init__(
        self,
        host: RankHost,
        segments: Segments,
        stages: Mapping[int, Stage],
        step_data: StepData,
        caller: Caller,
        finished: Callable[[Timeline], None],
        metrics: StepMetrics,
        kind: Hashable,
    ) -> None:
        self.caller = caller
        self.segments = segments
        self.timelines: deque[Timeline] = deque(maxlen=_REMEMBERED)
        self.num_parts = 0
        self._host = host
        self._stages = stages
        self._step_data = step_data
        #: Tables keyed by micro-batch: inputs, targets, loss factors, functions that compute metrics, and paths.
        self._given: tuple[dict[int, Any], ...] = ({}, {}, {}, {}, {})
        #: For each queued step: the weighting of its losses, and whether the step computes metrics.
        self._queued: deque[tuple[Weighting, bool]] = deque()
        self._parts: deque[Any] = deque()
        self._finished = finished
        self._metrics = metrics
        self._kind = kind
        self._steps = 0
        #: For each recent step: its loss, and the function that reads its metrics.
        self._losses: dict[int, tuple[Tensor, Callable[[], Mapping[str, Tensor]]]] = {}
        self._busy = threading.Lock()
        step_data.inputs, step_data.targets, step_data.factors, step_data.metrics, step_data.paths = self._given
        step_data.key = partial(_key, step_data.seed, step_data.step, segments.num_microbatches)
        self._run = host.executor.begin(self._run_spec(), caller, values=step_data.values)
        self._kept = KeptBatches(segments, self._run.ahead, {*host.grid.devices})
        self.open = True

    def _run_spec(self) -> RunSpec:
        segments = self.segments
        uses = {index: segments.uses(index) for index in self._stages}
        own = RunStages(program=segments.program, stages=self._stages, step_data=self._step_data, uses=uses)
        return RunSpec(
            own.program,
            own.stages,
            prepare=own.begin,
            finish=own.end,
            pair=segments.pair,
            period=segments.num_microbatches,
        )

    def step(self, batch: Batch, weighting: Weighting, measure: Metrics | None = None) -> Tensor:
        """Queue a step, and wait until all ranks of this process have run the previous step.

        With one process per rank, this call runs the rank's part of the step without waiting for the other ranks to
        finish, and the returned loss may not have arrived yet. An exception in a layer is raised here and ends the
        stream.

        Returns:
            The loss of the previous step; at the first call, the loss of the first step.

        """
        with self._alone("step"):
            self._kept.check()
            self._kept.add(self._steps, (batch.inputs, batch.targets))
            first = self._steps * self.segments.num_microbatches
            functions = [] if measure is None else [measure] * len(batch.rows)
            paths = batch.paths.paths or [0] * len(batch.rows)
            given: list[Any] = [batch.inputs, batch.targets, weighting.factors, functions, paths]
            for table, values in zip(self._given, given, strict=True):
                table.update(enumerate(values, first))
            if have_accelerator():
                self._step_data.ready.update(batch.ready())
            self._queued.append((weighting, measure is not None))
            self._hand(self.segments.segment(self._steps))
            self._steps += 1
            while len(self._parts) > min(self._run.ahead, self._steps - 1):
                self._finish_step()
            return self._shown(max(0, self._steps - 2))

    def flush(self) -> Tensor:
        """Finish all queued steps, end the stream, and return the last step's loss.

        Raises the same errors as ``step``.
        """
        with self._alone("flush"):
            self._kept.check()
            while self._parts:
                self._finish_step()
            for stage in self._stages.values():
                if stage.weights is not None:
                    stage.weights.end_at(self._steps * self.segments.num_microbatches)
            self._hand(self.segments.cooldown(self._steps))
            self._finish_part()
            self._end()
            return self._shown(self._steps - 1)

    def _shown(self, step: int) -> Tensor:
        """Return a step's loss, and make ``StepMetrics.read`` return the metrics of the same step."""
        loss, self._metrics.read = self._losses[step]
        return loss

    def abandon(self) -> None:
        """Stop all ranks and end the stream."""
        if self.open:
            self._run.abandon()
            self._end()

    @property
    def busy(self) -> bool:
        """Whether a step or a flush is in progress."""
        return self._busy.locked()

    @property
    def versions(self) -> tuple[tuple[int, ...], ...]:
        """The weight versions used so far, as in ``Program.versions``; empty if early timelines have been discarded."""
        whole = self.num_parts == len(self.timelines)
        count = self._steps * self.segments.num_microbatches
        return self.segments.versions(count) if whole else ()

    @contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        """A context for one call of ``method``. An exception within the context ends the stream.

        Raises ExecutionError if another call is in progress, or if the call comes from inside a running step.
        """
        self._host.executor.check_outside(method)
        if not self._busy.acquire(blocking=False):
            raise ExecutionError(
                "a pipeline may run only one call at a time; another call is still running; call again after it has "
                "returned"
            )
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._busy.release()

    def _hand(self, orders: Orders) -> None:
        self._parts.append(self._run.hand(orders))

    def _finish_part(self) -> None:
        self.timelines.append(self._run.finish(self._parts.popleft()))
        self.num_parts += 1
        self._finished(self.timelines[-1])

    def _finish_step(self) -> None:
        """Wait until the ranks have run the segment of the oldest unfinished step, and store the step's loss.

        All forwards of the step are in this segment. Some backwards of the step may be in later segments.
        """
        step = self.num_parts
        weighting, measures = self._queued.popleft()
        self._finish_part()
        self._step_data.wait_for_copies()
        size = self.segments.num_microbatches
        own = range(step * size, (step + 1) * size)
        losses = self._step_data.losses
        last = self.segments.program.placement[-1]

        def loss() -> Tensor:
            return weighting.total([used_here(losses.pop(number)) for number in own])

        run = RunResults(
            rank=last,
            loss=loss,
            step_data=self._step_data,
            microbatches=own,
            weighting=weighting,
            kind=self._kind,
            measures=measures,
        )
        shown = self._metrics.finish(self._host, run)
        self._losses[step] = shown, self._metrics.read
        self._losses.pop(step - 2, None)
        for number in own:
            for table in self._given:
                table.pop(number, None)

    def _end(self) -> None:
        self.open = False
        self._host.executor.end(self._run)


def _key(seed: int, first_step: int, step_size: int, number: int) -> Key:
    """Return the random key of a micro-batch in a stream. Micro-batch numbers in a stream continue across steps."""
    steps, microbatch = divmod(number, step_size)
    return Key(seed, first_step + steps, microbatch)
