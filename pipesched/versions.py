"""Versions: which version of a stage's weights each micro-batch uses, read from the program.

Version v is the weights after v updates of the stage. A micro-batch's forward and backward use one version.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipesched.actions import Kind
from pipesched.program import Program

__all__ = ["Uses", "update_groups", "used_versions"]

_NEVER = -1  # stands for the version of a micro-batch that does not visit the stage


@dataclass(frozen=True)
class Uses:
    """The version of one stage's weights that each micro-batch uses.

    used: by micro-batch. period: (micro-batches, updates) of a step, where the steps go on for ever: what follows
    repeats the last step of ``used``, as many versions later.
    """

    used: tuple[int, ...]
    period: tuple[int, int] | None = None

    def version(self, microbatch: int) -> int:
        """The version that a micro-batch uses."""
        if self.period is None or microbatch < len(self.used):
            return self.used[microbatch]
        microbatches, updates = self.period
        steps = (microbatch - len(self.used)) // microbatches + 1
        return self.used[microbatch - steps * microbatches] + steps * updates

    def users(self, version: int) -> Iterator[int]:
        """The micro-batches that use a version."""
        yield from (microbatch for microbatch, used in enumerate(self.used) if used == version)
        if self.period is None:
            return
        microbatches, updates = self.period
        first = len(self.used) - microbatches
        for microbatch in range(first, len(self.used)):
            steps, rest = divmod(version - self.used[microbatch], updates)
            if steps > 0 and not rest:
                yield microbatch + steps * microbatches


def used_versions(program: Program) -> tuple[tuple[int, ...], ...]:
    """The version that each micro-batch uses, by stage: as the program says, else the newest when its F runs."""
    found: list[tuple[int, ...]] = []
    for stage, rank in enumerate(program.placement):
        written = program.versions[stage] if program.versions else ()
        own = program.orders.rank(rank)
        own = own[own.stage == stage]
        forwards = own.are(Kind.F)
        table = np.full(program.num_microbatches, _NEVER)
        table[own.microbatch[forwards]] = np.cumsum(own.are(Kind.UPDATE))[forwards]
        found.append(written or tuple(table.tolist()))
    return tuple(found)


def update_groups(program: Program) -> tuple[tuple[int, ...], ...]:
    """The micro-batches whose gradients each update applies, ascending; validation proves them equal on all stages."""
    groups: list[tuple[int, ...]] = []
    waiting: list[int] = []
    last = program.num_stages - 1
    for action in program.orders[program.placement[last]]:
        if action.stage == last and action.kind in (Kind.B, Kind.W):
            waiting.append(action.microbatch)
        elif action.stage == last and action.kind is Kind.UPDATE:
            groups.append(tuple(sorted(waiting)))
            waiting = []
    return tuple(groups)
