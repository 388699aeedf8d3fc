"""Async steps: steps of an asynchronous schedule, which run on into each other until a flush.

Every rank has the orders of the steps asked for so far and goes through them without waiting for the others: in one
process threads, which their caller is a step ahead of; in processes of their own the callers themselves. Weights are
updated on the way; older versions live on as long as micro-batches in flight use them (PipeDream, Narayanan et al.
2019; PipeDream-2BW, 2021).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.program.segments import Orders, Segments
from pipesched.runtime.executors.threads import RunSpec, Timeline
from pipesched.runtime.microbatches import Batch, Weighting
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.keyed_random import Key
from pipesched.tensors.payload import used_here

__all__ = ["Stream"]

_REMEMBERED = 6  # parts whose times are kept


class Stream:
    """One stream, from its first step to its flush. step_data: empty, with the number of the first step.

    finished: called with the times of each part that every rank of this process has run. Raises ExecutionError where
    another run is under way.
    """

    def __init__(
        self,
        host: RankHost,
        segments: Segments,
        stages: Mapping[int, Stage],
        step_data: StepData,
        caller: Caller,
        finished: Callable[[Timeline], None],
    ) -> None:
        self.caller = caller
        self.segments = segments
        self.timelines: deque[Timeline] = deque(maxlen=_REMEMBERED)
        self.num_parts = 0
        self._host = host
        self._stages = stages
        self._step_data = step_data
        #: By micro-batch: inputs, targets and factors.
        self._given: tuple[dict[int, Any], dict[int, Any], dict[int, Any]] = ({}, {}, {})
        self._weightings: deque[Weighting] = deque()
        self._parts: deque[Any] = deque()
        self._finished = finished
        self._steps = 0
        self._losses: dict[int, Tensor] = {}
        self._busy = threading.Lock()
        step_data.inputs, step_data.targets, step_data.factors = self._given
        step_data.key = partial(_key, step_data.seed, step_data.step, segments.num_microbatches)
        self._run = host.executor.begin(_run_spec(segments, stages, step_data), caller)
        self.open = True

    def step(self, batch: Batch, weighting: Weighting) -> Tensor:
        """Enqueue a step; wait until the one before has run up to it on all ranks of this process.

        Returns that step's loss; of the first step its own. Where each rank is a process, it runs its part of the step
        here, waits for no other's end, and the loss is on its way. Raises what a layer raised; the stream is then over.
        """
        with self._alone("step"):
            first = self._steps * self.segments.num_microbatches
            given: list[Any] = [batch.inputs, batch.targets, weighting.factors]
            for table, values in zip(self._given, given, strict=True):
                table.update(enumerate(values, first))
            self._weightings.append(weighting)
            self._hand(self.segments.segment(self._steps))
            self._steps += 1
            while len(self._parts) > min(self._run.ahead, self._steps - 1):
                self._finish_step()
            return self._losses[max(0, self._steps - 2)]

    def flush(self) -> Tensor:
        """Run what is left of the steps asked for, and end the stream. Returns the last step's loss. Raises as step."""
        with self._alone("flush"):
            while self._parts:
                self._finish_step()
            for stage in self._stages.values():
                if stage.weights is not None:
                    stage.weights.end_at(self._steps * self.segments.num_microbatches)
            self._hand(self.segments.cooldown(self._steps))
            self._finish_part()
            self._end()
            return self._losses[self._steps - 1]

    def abandon(self) -> None:
        """Stop all ranks where they are, and end the stream."""
        if self.open:
            self._run.abandon()
            self._end()

    @property
    def versions(self) -> tuple[tuple[int, ...], ...]:
        """As a program's, for the parts remembered; () where the stream's beginning is not among them."""
        whole = self.num_parts == len(self.timelines)
        count = self._steps * self.segments.num_microbatches
        return self.segments.versions(count) if whole else ()

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One call at a time, and none by a rank. What is raised within ends the stream."""
        self._host.executor.check_outside(what)
        if not self._busy.acquire(blocking=False):
            raise ExecutionError(
                "one step at a time; this one was called while another is under way; call it after that one returns"
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
        """The oldest step under way has run up to the next one: its forwards are done, and its loss is known."""
        step = self.num_parts
        weighting = self._weightings.popleft()
        self._finish_part()
        size = self.segments.num_microbatches
        own = range(step * size, (step + 1) * size)
        losses = self._step_data.losses
        last = self.segments.program.placement[-1]
        self._losses[step] = self._host.loss(
            last, lambda: weighting.total([used_here(losses.pop(number)) for number in own])
        )
        self._losses.pop(step - 2, None)
        for number in own:
            for table in self._given:
                table.pop(number, None)

    def _end(self) -> None:
        self.open = False
        self._host.executor.end(self._run)


def _key(seed: int, first_step: int, step_size: int, number: int) -> Key:
    """The key of a micro-batch, whose number counts on over the steps of the stream."""
    steps, microbatch = divmod(number, step_size)
    return Key(seed, first_step + steps, microbatch)


def _run_spec(segments: Segments, stages: Mapping[int, Stage], step_data: StepData) -> RunSpec:
    def begin(caller: Caller) -> None:
        if caller.autocasts:
            step_data.autocast = caller.autocast
        for index, stage in stages.items():
            stage.begin(step_data, segments.uses(index))

    def end(failed: bool) -> None:
        for stage in stages.values():
            stage.end(failed)

    return RunSpec(
        segments.program, stages, prepare=begin, finish=end, pair=segments.pair, period=segments.num_microbatches
    )
