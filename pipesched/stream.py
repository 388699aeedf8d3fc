"""Stream: steps of an asynchronous schedule, which run on into each other until a flush.

Every rank has the orders of the steps asked for so far and goes through them without waiting for the others. Weights
are updated on the way; older versions live on as long as micro-batches in flight use them (PipeDream, Narayanan et
al. 2019; PipeDream-2BW, 2021).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from pipesched.batch import Batch, Weighting
from pipesched.caller import Caller
from pipesched.errors import ExecutionError
from pipesched.executors.local import LocalExecutor, Part, Timeline, Work
from pipesched.payload import used_here
from pipesched.segments import Orders, Segments
from pipesched.stage import Feed, Stage

__all__ = ["Stream"]

_REMEMBERED = 6  # parts whose times are kept


class Stream:
    """One stream, from its first step to its flush. feed: empty, with the number of the first step.

    finished: called with the times of each part that every rank has run. Raises ExecutionError where another run is
    under way.
    """

    def __init__(
        self,
        executor: LocalExecutor,
        segments: Segments,
        stages: Mapping[int, Stage],
        feed: Feed,
        caller: Caller,
        finished: Callable[[Timeline], None],
    ) -> None:
        self.caller = caller
        self.segments = segments
        self.timelines: deque[Timeline] = deque(maxlen=_REMEMBERED)
        self.num_parts = 0
        self._executor = executor
        self._stages = stages
        self._feed = feed
        self._inputs: dict[int, object] = {}
        self._targets: dict[int, object] = {}
        self._factors: dict[int, float | None] = {}
        self._weightings: deque[Weighting] = deque()
        self._parts: deque[Part] = deque()
        self._finished = finished
        self._steps = 0
        self._loss: Tensor | None = None
        self._busy = threading.Lock()
        feed.step_size = segments.num_microbatches
        feed.inputs, feed.targets, feed.factors = self._inputs, self._targets, self._factors
        self._run = executor.begin(_work(segments, stages, feed), caller)
        self.open = True

    def step(self, batch: Batch, weighting: Weighting) -> Tensor:
        """Enqueue a step; wait until the one before has run up to it on all ranks.

        Returns that step's loss; of the first step its own. Raises what a layer raised; the stream is then over.
        """
        with self._alone("step"):
            first = self._steps * self.segments.num_microbatches
            self._inputs.update(enumerate(batch.inputs, first))
            self._targets.update(enumerate(batch.targets, first))
            self._factors.update(enumerate(weighting.factors, first))
            self._weightings.append(weighting)
            self._hand(self.segments.segment(self._steps))
            self._steps += 1
            while len(self._parts) > (self._steps > 1):
                self._finish_step()
            return self._newest

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
            return self._newest

    def abandon(self) -> None:
        """Stop all ranks where they are, and end the stream."""
        if self.open:
            self._run.stop()
            self._run.wait()
            self._end()

    @property
    def versions(self) -> tuple[tuple[int, ...], ...]:
        """As a program's, for the parts remembered; () where the stream's beginning is not among them."""
        whole = self.num_parts == len(self.timelines)
        count = self._steps * self.segments.num_microbatches
        return self.segments.versions(count) if whole else ()

    @property
    def _newest(self) -> Tensor:
        if self._loss is None:
            raise ExecutionError("a stream has a loss once a step has run; none has; call step")
        return self._loss

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One call at a time, and none by a rank. What is raised within ends the stream."""
        self._executor.check_outside(what)
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
        part = self._parts.popleft()
        self._run.wait_for(part)
        self._run.check()
        part.catch_up()
        self.timelines.append(part.timeline())
        self.num_parts += 1
        self._finished(self.timelines[-1])

    def _finish_step(self) -> None:
        """The oldest step under way has run up to the next one: its forwards are done, and its loss is known."""
        step = self.num_parts
        self._finish_part()
        size = self.segments.num_microbatches
        own = range(step * size, (step + 1) * size)
        self._loss = self._weightings.popleft().total([used_here(self._feed.losses.pop(number)) for number in own])
        for number in own:
            for table in (self._inputs, self._targets, self._factors):
                table.pop(number, None)

    def _end(self) -> None:
        self.open = False
        self._executor.end(self._run)


def _work(segments: Segments, stages: Mapping[int, Stage], feed: Feed) -> Work:
    def begin(caller: Caller) -> None:
        feed.autocast = caller.autocast
        for index, stage in stages.items():
            stage.begin(feed, segments.uses(index))

    def end(failed: bool) -> None:
        for stage in stages.values():
            stage.end(failed)

    return Work(segments.program, stages, begin, finish=end, pair=segments.pair)
