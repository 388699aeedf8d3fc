"""Rank run: one rank's run of a stream of steps, in a separate process."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipesched.program.actions import Action
from pipesched.runtime.executors.interpreter import BoundRank
from pipesched.runtime.executors.threads import RunSpec, Timeline
from pipesched.tensors.caller_context import Caller

__all__ = ["RankRun", "RankTimeline"]


@dataclass(frozen=True)
class RankTimeline(Timeline):
    """The time stamps of one rank's run.

    ``began_s`` is the start of the run in seconds, on rank 0's clock. ``orders`` has the actions that each rank ran.
    """

    began_s: float
    orders: Sequence[tuple[Action, ...]]

    def times(self) -> NDArray[np.float64]:
        """Return a row for each action of this rank: its start and its end, in seconds since the run began."""
        return np.array([(span.start_s, span.end_s) for span in self.spans()], np.float64).reshape(-1, 2)


class RankRun:
    """A stream of steps that one rank is running, created by ``ProcessExecutor.begin``.

    Each call to ``hand`` runs the next part of the rank's order of actions.
    """

    ahead = 0  # hand() runs each part, so no part is ever queued

    def __init__(
        self,
        run_spec: RunSpec,
        caller: Caller,
        rank: BoundRank,
        run_part: "Callable[[RankRun, Sequence[tuple[Action, ...]]], RankTimeline]",
        leave: Callable[[str], None],
    ) -> None:
        self.run_spec = run_spec
        self.caller = caller
        self.rank = rank
        self.began_s = time.perf_counter()
        self.failed = False
        self._run_part = run_part
        self._leave = leave

    def hand(self, orders: Sequence[tuple[Action, ...]]) -> RankTimeline:
        """Run the next part of this rank's order. Raises the same errors as ``ProcessExecutor.run``."""
        return self._run_part(self, orders)

    def finish(self, part: RankTimeline) -> RankTimeline:
        """Return the timeline unchanged: ``hand`` has already run the part."""
        return part

    def abandon(self) -> None:
        """Stop all ranks."""
        self.failed = True
        self._leave("it stopped before flush() had finished its steps")
