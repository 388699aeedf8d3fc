"""Segments: divides the orders of an asynchronous schedule into steps, so that any number of steps can run in sequence.

A schedule generates a program with a fixed number of steps, but training can run any number. Each rank's order is cut
before the first action of each step, into one segment per step. This module checks that the schedule repeats: after the
warm-up, every segment must equal the previous one, except that its micro-batches and updates are those of the next
step. The weight versions and the R and I actions must repeat in the same way. The cool-down then has the
same actions after any number of steps; only the indices of its micro-batches and updates differ.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import Ints
from pipesched.program.actions import Action, Kind
from pipesched.program.program import Program
from pipesched.program.weight_versions import Uses, update_groups, used_versions
from pipesched.units import counted

__all__ = ["Orders", "Segments", "enough_steps"]

#: The kinds that decide how a micro-batch's F runs: with an R, it is checkpointed; with an I, its backward is split.
_FORMS = (Kind.R, Kind.I)
#: For each rank, a part of its order.
Orders = tuple[tuple[Action, ...], ...]


def enough_steps(num_ranks: int, num_microbatches: int) -> int:
    """Return the number of steps to generate: the warm-up steps, two identical steps, and the step after them."""
    return 4 + -(-2 * num_ranks // num_microbatches)


class Segments:
    """The orders of any number of steps, extrapolated from a program of several steps.

    Args:
        program: a lowered program of `enough_steps` steps.
        num_microbatches: the number of micro-batches of a step.

    Raises:
        ScheduleError: the last two complete steps of the program differ, or a step needs an action of a later segment.

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
        """For each update of a step, the micro-batches (numbered from 0 in each step) whose gradients it applies."""
        size = self.num_microbatches
        groups = [tuple(number % size for number in group) for group in update_groups(self.program) if group[0] < size]
        if sorted(number for group in groups for number in group) != list(range(size)):
            raise ScheduleError(
                f"an update must not combine gradients of different steps; with "
                f"{counted(size, 'micro-batch')} per step, one update of schedule {self.program.name!r} applies the "
                f"gradients of {len(groups[-1])} micro-batches from two steps; place an update at the end of each step"
            )
        return tuple(sorted(groups))

    def versions(self, count: int) -> tuple[tuple[int, ...], ...]:
        """Return the weight versions of the first ``count`` micro-batches, in the form of `Program.versions`."""
        return tuple(tuple(map(self.uses(stage).version, range(count))) for stage in range(self.program.num_stages))

    @property
    def updates(self) -> int:
        """The number of updates in a step."""
        return len(self.groups)

    def segment(self, step: int) -> Orders:
        """Return each rank's actions from its first action of a step to its last action before the next step."""
        known = min(step, self._steps - 1)
        return self._moved([order[start:end] for order, (start, end) in self._ranges(known)], step - known)

    def cooldown(self, steps: int) -> Orders:
        """Return the actions that drain the pipeline after ``steps`` steps. Actions of later steps are left out."""
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
        """Return the weight version that each micro-batch uses on a stage, for any number of steps."""
        return Uses(self._used[stage][: self._steps * self.num_microbatches], (self.num_microbatches, self.updates))

    def pair(self, microbatch: int) -> int:
        """Map a micro-batch of any step to the program's micro-batch that has the same actions."""
        over = microbatch // self.num_microbatches - (self._steps - 1)
        return microbatch - max(0, over) * self.num_microbatches

    def _cut(self, rank: int) -> list[int]:
        """Return, for each step after the first, how many actions a rank runs before its first action of the step."""
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
        """Check that no action waits for a later segment, so that a step can end before the next one is requested."""
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
            waiting, awaited = (program.columns.action(int(rows[late[0]])) for rows in (row, needed))
            raise ScheduleError(
                f"a step must be able to finish before the next step is requested; in schedule {program.name!r}, "
                f"{waiting} waits for {awaited}, which comes after the first action of a later step; move {awaited} "
                f"before that action"
            )
        self._check_losses(segment)

    def _check_losses(self, segment: Ints) -> None:
        """Check that each step's segment contains the step's forwards on the last stage, which compute the loss."""
        columns = self.program.columns
        last = self.program.num_stages - 1
        late = columns.are(Kind.F) & (columns.stage == last) & (segment > columns.microbatch // self.num_microbatches)
        if late.any():
            forward = columns.action(int(np.flatnonzero(late)[0]))
            raise ScheduleError(
                f"a step's loss must be computed before its rank begins the next step; schedule {self.program.name!r} "
                f"has {forward} after the first action of a later step; move it before that action, or pass a Program, "
                f"which runs step by step"
            )

    @property
    def _last_two(self) -> tuple[int, int]:
        return self._steps - 2, self._steps - 1

    def _check_repeats(self) -> None:
        before, last = ([order[start:end] for order, (start, end) in self._ranges(step)] for step in self._last_two)
        if self._moved(before, 1) != tuple(last):
            raise self._not_repeating(f"step {self._steps - 1} differs from step {self._steps - 2}")
        size = self.num_microbatches
        for stage, used in enumerate(self._used):
            earlier = used[-3 * size : -2 * size]
            later = used[-2 * size : -size]
            if [version + self.updates for version in earlier] != list(later):
                versions = f"{earlier} in one step and {later} in the next"
                raise self._not_repeating(f"stage {stage} uses the weight versions {versions}")
        columns = self.program.columns
        for kind in _FORMS:
            rows = columns[columns.are(kind)]
            step, in_step = np.divmod(rows.microbatch, size)
            pairs = [set(zip(rows.stage[step == s], in_step[step == s], strict=True)) for s in self._last_two]
            if pairs[0] != pairs[1]:
                raise self._not_repeating(f"two steps have different {kind} actions")

    def _not_repeating(self, difference: str) -> ScheduleError:
        return ScheduleError(
            f"an asynchronous schedule must repeat the same actions in every step after the warm-up; schedule "
            f"{self.program.name!r} with {self.num_microbatches} micro-batches per step does not: {difference}; make "
            f"its steps repeat, or pass a Program, which runs step by step"
        )
