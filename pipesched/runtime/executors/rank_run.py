"""Rank run: a rank in a process of its own, on its way through a program: in one part, or in those of a stream."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipesched.program.actions import Action
from pipesched.runtime.executors.interpreter import Rank
from pipesched.runtime.executors.threads import RunSpec, Timeline
from pipesched.tensors.caller_context import Caller

__all__ = ["RankRun", "RankTimeline"]


@dataclass(frozen=True)
class RankTimeline(Timeline):
    """What one rank ran when. began_s: the run's begin on the clock that all ranks share."""

    began_s: float


class RankRun:
    """A stream under way in one rank, which runs each part of its order where it is asked for. Made by ``begin``."""

    ahead = 0  # parts that have been asked for and not yet run

    def __init__(
        self,
        run_spec: RunSpec,
        caller: Caller,
        rank: Rank,
        run_part: "Callable[[RankRun, tuple[Action, ...]], RankTimeline]",
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
        """Run this rank's next part. Raises as ``ProcessExecutor.run``."""
        rank = self.rank.index
        return self._run_part(self, orders[rank] if rank < len(orders) else ())

    def finish(self, part: RankTimeline) -> RankTimeline:
        """What ran when in a part."""
        return part

    def abandon(self) -> None:
        """Stop all ranks."""
        self.failed = True
        self._leave("it left a stream before its flush")
