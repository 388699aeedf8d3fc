"""Segments: the orders of a stream, steps that run on into each other for as long as anybody asks for more.

A schedule writes so many steps; a stream has no number of steps. Each rank's order is cut before the first action of
every later step: the segments. From some step on a segment is the one before it, a step later; so is the cool-down
that ends the stream. Both are checked, since nothing else says that a schedule repeats.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Ints
from pipesched.program.actions import Action, Kind
from pipesched.program.program import Program
from pipesched.program.weight_versions import Uses, update_groups, used_versions

__all__ = ["Orders", "Segments", "enough_steps"]

_FORMS = (Kind.R, Kind.I)  # a forward must know whether one comes
#: A part of every rank's order.
Orders = tuple[tuple[Action, ...], ...]


def enough_steps(num_ranks: int, num_microbatches: int) -> int:
    """So many steps show a stream: warm-up, two steps that repeat, and one to see where the last of them ends."""
    return 4 + -(-2 * num_ranks // num_microbatches)


class Segments:
    """The endless orders that a program of several steps is the beginning of.

    program: lowered, of ``enough_steps``. num_microbatches: of a step. Raises ScheduleError where it does not repeat.
    """

    def __init__(self, program: Program, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.program = program
        self._steps = program.num_microbatches // num_microbatches - 1
        self._used = used_versions(program)
        self._cuts = [self._cut(rank) for rank in range(program.num_ranks)]
        self._check_cuts()
        self._check_repeats()

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The micro-batches of a step, counted within it, that each of its updates is of."""
        size = self.num_microbatches
        own = [tuple(number % size for number in group) for group in update_groups(self.program) if group[0] < size]
        if sorted(number for group in own for number in group) != list(range(size)):
            raise ScheduleError(
                f"an update of schedule {self.program.name!r} is of micro-batches of one step; with {size} a step an "
                f"update is of {len(own[-1])} that belong to two; update at the end of each step"
            )
        return tuple(sorted(own))

    def versions(self, count: int) -> tuple[tuple[int, ...], ...]:
        """The versions of the first so many micro-batches, by stage, as a program says them."""
        return tuple(tuple(map(self.uses(stage).version, range(count))) for stage in range(self.program.num_stages))

    @property
    def updates(self) -> int:
        """How many updates a step has."""
        return len(self.groups)

    def segment(self, step: int) -> Orders:
        """What each rank runs for a step: up to the first action of the next one."""
        known = min(step, self._steps - 1)
        return self._moved([order[start:end] for order, (start, end) in self._ranges(known)], step - known)

    def cooldown(self, steps: int) -> Orders:
        """What is left to run where the stream ends after so many steps: what concerns later ones is left out."""
        known = min(steps, self._steps)
        rest = (order[ends[known - 1] :] for order, ends in zip(self.program.orders, self._cuts, strict=True))
        microbatches = known * self.num_microbatches
        updates = known * self.updates
        kept = [
            tuple(a for a in order if a.microbatch < (updates if a.kind is Kind.UPDATE else microbatches))
            for order in rest
        ]
        return self._moved(kept, steps - known)

    def uses(self, stage: int) -> Uses:
        """The versions of a stage's weights that the stream uses."""
        return Uses(self._used[stage][: self._steps * self.num_microbatches], (self.num_microbatches, self.updates))

    def pair(self, microbatch: int) -> int:
        """The micro-batch of the program that runs as this one of the stream does."""
        over = microbatch // self.num_microbatches - (self._steps - 1)
        return microbatch - max(0, over) * self.num_microbatches

    def _cut(self, rank: int) -> list[int]:
        """How many actions of a rank precede the first of each step after the first."""
        columns = self.program.orders.rank(rank)
        step = np.where(columns.are(Kind.UPDATE), 0, columns.microbatch // self.num_microbatches)
        begun: Ints = np.maximum.accumulate(step)
        return [int(np.searchsorted(begun, following)) for following in range(1, self._steps + 1)]

    def _ranges(self, step: int) -> list[tuple[tuple[Action, ...], tuple[int, int]]]:
        starts = [0 if step == 0 else ends[step - 1] for ends in self._cuts]
        return [
            (self.program.orders[rank], (start, ends[step]))
            for rank, (start, ends) in enumerate(zip(starts, self._cuts, strict=True))
        ]

    def _moved(self, orders: Sequence[tuple[Action, ...]], steps: int) -> Orders:
        if not steps:
            return tuple(orders)
        later = steps * self.num_microbatches
        updates = steps * self.updates
        return tuple(
            tuple(
                action._replace(microbatch=action.microbatch + (updates if action.kind is Kind.UPDATE else later))
                for action in order
            )
            for order in orders
        )

    def _check_cuts(self) -> None:
        """What an action needs lies in no later segment: a step can run before the next one is asked for."""
        program = self.program
        offsets = program.orders.offsets
        segment = np.concatenate(
            [
                np.searchsorted(np.array(ends), np.arange(offsets[rank + 1] - offsets[rank]), side="right")
                for rank, ends in enumerate(self._cuts)
            ]
        )
        row, needed = program.requirements
        late = np.flatnonzero(segment[needed] > segment[row])
        if len(late):
            one, other = (program.columns.action(int(rows[late[0]])) for rows in (row, needed))
            raise ScheduleError(
                f"a step runs before the next one is asked for; schedule {program.name!r} has {one} wait for {other}, "
                f"which comes behind the first action of a later step; move {other} before it"
            )
        self._check_losses(segment)

    def _check_losses(self, segment: Ints) -> None:
        """A step's forwards lie in its own segment: its loss is known once that has run."""
        columns = self.program.columns
        last = self.program.num_stages - 1
        late = columns.are(Kind.F) & (columns.stage == last) & (segment > columns.microbatch // self.num_microbatches)
        if late.any():
            one = columns.action(int(np.flatnonzero(late)[0]))
            raise ScheduleError(
                f"a step's loss is known before its rank begins the next one; schedule {self.program.name!r} has {one} "
                f"behind the first action of a later step; move it before that, or pass a Program, which runs step by "
                f"step"
            )

    @property
    def _last_two(self) -> tuple[int, int]:
        return self._steps - 2, self._steps - 1

    def _check_repeats(self) -> None:
        before, last = ([order[start:end] for order, (start, end) in self._ranges(step)] for step in self._last_two)
        if self._moved(before, 1) != tuple(last):
            raise self._not_repeating(f"step {self._steps - 1} is not step {self._steps - 2} over again")
        size = self.num_microbatches
        for stage, used in enumerate(self._used):
            one = used[-3 * size : -2 * size]
            two = used[-2 * size : -size]
            if [version + self.updates for version in one] != list(two):
                raise self._not_repeating(f"stage {stage} uses the versions {one} in one step and {two} in the next")
        columns = self.program.columns
        for kind in _FORMS:
            rows = columns[columns.are(kind)]
            step, own = np.divmod(rows.microbatch, size)
            pairs = [set(zip(rows.stage[step == s], own[step == s], strict=True)) for s in self._last_two]
            if pairs[0] != pairs[1]:
                raise self._not_repeating(f"one step has more {kind} than the next")

    def _not_repeating(self, what: str) -> ScheduleError:
        return ScheduleError(
            f"a stream goes on for ever: from some step on each is the one before, a step later; schedule "
            f"{self.program.name!r} with {self.num_microbatches} micro-batches a step does not repeat: {what}; "
            f"write it so that it does, or pass a Program, which runs step by step"
        )
