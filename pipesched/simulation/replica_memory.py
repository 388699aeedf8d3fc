"""Replica memory: the bytes that a rank holds because its pipeline has replicas.

Replicas can divide the weights, gradients and optimizer states among themselves (ZeRO, Rajbhandari et al. 2020,
arXiv:1910.02054). Each rank needs buffers to sum gradients over the replicas (REDUCE) and to exchange updated weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipesched.program.action_arrays import CODES, Ints
from pipesched.program.actions import Kind
from pipesched.program.gathers import first_uses
from pipesched.program.program import Program
from pipesched.program.reductions import early_stages, last_gradients

__all__ = ["CopyMemory", "ModelStates", "ReplicaMemory", "held_states", "held_with_replicas"]


class ModelStates(NamedTuple):
    """The sizes in bytes of weights, gradients and optimizer states."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total_bytes(self) -> int:
        """The sum of the three fields."""
        return sum(self)


def held_states(whole: ModelStates, part: ModelStates, *, zero: int, once: bool = True) -> ModelStates:
    """Return the peak sizes in bytes of the model states that a rank holds during a step.

        >>> whole = ModelStates(weights=2 * 10**9, gradients=2 * 10**9, optimizer=12 * 10**9)
        >>> held_states(whole, ModelStates(*(size // 8 for size in whole)), zero=2, once=False)
        ModelStates(weights=2000000000, gradients=250000000, optimizer=1500000000)

    The buffers for summing gradients and gathering weights are not included.

    If each gradient is reduced only once per step, the rank holds full (unsharded) gradients until its last backward.
    If each divided weight is gathered only once per step, the rank holds full weights, and its own part is a view of
    the full weights.

    Args:
        whole: the model states of the rank's stages.
        part: the part of each model state that this replica holds if the state is divided.
        zero: the model states that replicas divide. 0: none; 1: the optimizer's; 2: also gradients; 3: also weights.
        once: whether each gradient is reduced, and each divided weight gathered, only once per step. If False, each
            weight is gathered before every use and freed afterwards, and each gradient is reduced and freed as soon as
            it is computed. Default: True.

    """
    return ModelStates(
        weights=whole.weights if zero < 3 or once else part.weights,
        gradients=whole.gradients if zero < 2 or once else part.gradients,
        optimizer=whole.optimizer if zero < 1 else part.optimizer,
    )


class CopyMemory(NamedTuple):
    """The memory of the flat copies of one bucket of gradients, in bytes."""

    #: Size of the copies, from the REDUCE until the sum is complete.
    buffer: int
    #: The memory that the collective needs in addition to the copies, while it runs.
    working: int
    #: Size of the sum, until the rank waits for the sums of the stage.
    summed: int
    #: The part of the sum that is the gradient itself, until the update.
    kept: int = 0
    #: Gradients that are freed once they are copied.
    released: int = 0
    #: Activations that the last backward has freed by the time it completes this bucket. Counted only if the sum then
    #: starts during the backward.
    freed: int = 0

    def complete(self) -> "CopyMemory":
        """Return the memory after the collective has ended."""
        return self._replace(buffer=self.summed, working=0)


_NO_COPIES = CopyMemory(0, 0, 0)
_EVENTS = Kind.REDUCE, Kind.UNSHARD, Kind.RESHARD, Kind.NORM, Kind.UPDATE


@dataclass(frozen=True, kw_only=True)
class ReplicaMemory:
    """The memory that a stage needs because its pipeline has replicas, in bytes."""

    #: The flat copies of each bucket.
    buckets: tuple[CopyMemory, ...] = ()
    #: The flat copies of gradients that are reduced after the run, such as those of tied weights.
    late: CopyMemory = _NO_COPIES
    #: Buffers for exchanging updated weights between replicas.
    spread: int = 0
    #: Buffers for gathering the stage's weights, from the UNSHARD until the first use of the weights. They include
    #: copies of this replica's own parts, which are therefore held twice.
    gather: CopyMemory = _NO_COPIES
    #: The largest copy that a RESHARD makes of this replica's rows of a weight, before it frees the whole weight.
    cut: int = 0

    @classmethod
    def of_buffers(cls, sizes: Sequence[int]) -> "ReplicaMemory":
        """Return the memory of a stage whose summed gradients are not divided. ``sizes``: bytes of each bucket."""
        return cls(buckets=tuple(CopyMemory(size, size, size) for size in sizes))


_NOTHING = ReplicaMemory()


class HeldWithReplicas(NamedTuple):
    """The bytes that a rank holds or frees because its pipeline has replicas, for each action of a program."""

    #: Flat copies and exchange buffers that the rank holds during each action, besides the action's transients.
    buffers: Ints
    #: Gradients that are freed before each action, but would otherwise be held until the update.
    released: Ints


def held_with_replicas(
    program: Program, stages: Sequence[ReplicaMemory], update_transient_bytes: Sequence[int]
) -> HeldWithReplicas:
    """Return upper bounds on the bytes that ranks hold to sum gradients and exchange weights, for each action.

    A rank's collectives run one after the other, while the rank computes. So the order of actions determines when a
    gradient is copied to be summed, but not when the sum is complete. The sum is complete, at the latest, once the rank
    has waited for it or for a later collective.

    Args:
        program: the program.
        stages: the memory of each stage.
        update_transient_bytes: the temporary memory of each stage's update, which the caller adds to the result.

    """
    held = HeldWithReplicas(*np.zeros((2, len(program.columns)), np.int64))
    if any(one != _NOTHING for one in stages):
        for rank in range(program.num_ranks):
            _RankCopies(program, stages, update_transient_bytes, held).fill(rank)
    return held


class _RankCopies:
    """Computes, for each action of a rank, the size of the copies of weights and gradients that replicas require."""

    def __init__(
        self,
        program: Program,
        stages: Sequence[ReplicaMemory],
        update_transient_bytes: Sequence[int],
        held: HeldWithReplicas,
    ) -> None:
        self._program = program
        self._stages = stages
        self._transients = update_transient_bytes
        self._held = held
        columns = program.columns
        self._kinds = columns.kind
        self._stage_of = columns.stage
        self._bucket_of = columns.microbatch
        #: (stage, copies) of collectives that may be running or waiting to run, in the order of their starts.
        self._started: list[tuple[int, CopyMemory]] = []
        self._kept: dict[int, int] = {}
        self._released: dict[int, int] = {}
        self._spread = 0
        #: The sums of the sizes, and of their changes on completion, over all started collectives; and the largest
        #: number of bytes that their copies may take.
        self._buffers = self._shrinks = self._copies = 0
        self._early = early_stages(program)
        self._first_uses = first_uses(program)

    def fill(self, rank: int) -> None:
        """Write the bytes that a rank holds during each of its actions."""
        begin, end = self._program.orders.offsets[rank : rank + 2].tolist()
        done = begin
        for row, early in self._events(begin, end):
            self._write(slice(done, row))
            self._run(row, early=early)
            done = row + 1
        self._write(slice(done, end))

    def _events(self, begin: int, end: int) -> Iterator[tuple[int, bool]]:
        """Yield (row, early) for each of the program's rows from ``begin`` to ``end`` that changes the memory held.

        ``early`` is True if the row is the last backward of one of the `early_stages`. The REDUCEs of such a stage
        start during that backward.
        """
        columns = self._program.columns
        last = last_gradients(self._program)
        here = {row for stage in self._early if begin <= (row := int(last[stage])) < end}
        uses = {row for row in self._first_uses if begin <= row < end}
        rows = np.flatnonzero(columns.are(*_EVENTS)[begin:end]) + begin
        for row in sorted({*here, *uses, *rows.tolist()}):
            yield row, row in here

    def _write(self, rows: slice) -> None:
        self._held.buffers[rows] = self._level()
        self._held.released[rows] = sum(self._released.values())

    def _run(self, row: int, *, early: bool) -> None:
        """Write the bytes that the rank holds during the action at ``row``, and update the copies held after it."""
        kind = self._kinds[row]
        stage = int(self._stage_of[row])
        here = slice(row, row + 1)
        gather = self._stages[stage].gather
        if row in self._first_uses:
            at = self._started.index((stage, gather))
            self._complete(at)
            del self._started[at]
            self._count()
            self._write(here)
        if early:
            self._write(here)
            for copies in self._stages[stage].buckets:
                self._start(stage, copies)
                within = self._level() - self._released.get(stage, 0) - copies.freed
                self._held.buffers[row] = max(int(self._held.buffers[row]), within)
                self._release(stage, copies)
        elif kind == CODES[Kind.UNSHARD]:
            self._start(stage, gather)
            self._write(here)
        elif kind == CODES[Kind.RESHARD]:
            self._write(here)
            self._held.buffers[row] += self._stages[stage].cut
        elif kind == CODES[Kind.REDUCE]:
            bucket = int(self._bucket_of[row])
            started = () if stage in self._early else self._stages[stage].buckets[bucket : bucket + 1]
            for copies in started:
                self._start(stage, copies)
            self._write(here)
            for copies in started:
                self._release(stage, copies)
        elif kind in (CODES[Kind.NORM], CODES[Kind.UPDATE]):
            self._end_sums(stage)
            self._write(here)
            if kind == CODES[Kind.UPDATE]:
                self._spread = max(self._spread, self._stages[stage].spread)
                spreading = self._level() - self._transients[stage]
                self._held.buffers[row] = max(int(self._held.buffers[row]), spreading)
                self._kept.pop(stage)
                self._released.pop(stage, None)

    def _start(self, stage: int, copies: CopyMemory) -> None:
        self._started.append((stage, copies))
        self._add(copies)

    def _add(self, copies: CopyMemory) -> None:
        """Count the copies of a collective that starts after all others."""
        self._buffers += copies.buffer
        self._copies = max(self._copies + copies.buffer, self._buffers + self._shrinks + copies.working)
        self._shrinks += copies.summed - copies.buffer

    def _count(self) -> None:
        """Count the copies of all started collectives again, because some have ended."""
        self._buffers = self._shrinks = self._copies = 0
        for _, copies in self._started:
            self._add(copies)

    def _release(self, stage: int, copies: CopyMemory) -> None:
        self._released[stage] = self._released.get(stage, 0) + copies.released

    def _end_sums(self, stage: int) -> None:
        """Wait for a stage's sums, and free the copies. The parts of the sums that serve as gradients are kept."""
        self._complete(max((at for at, (own, _) in enumerate(self._started) if own == stage), default=0))
        own = [copies for at, copies in self._started if at == stage]
        self._kept[stage] = self._kept.get(stage, 0) + sum(copies.kept for copies in own)
        self._started = [(at, copies) for at, copies in self._started if at != stage]
        self._count()

    def _complete(self, end: int) -> None:
        """Mark the collectives before index ``end`` as ended, because the rank has waited for the one at ``end``."""
        self._started[:end] = [(stage, copies.complete()) for stage, copies in self._started[:end]]

    def _level(self) -> int:
        """Return the maximum number of bytes that the rank may hold now.

        Any one of the started collectives may be running. The collectives started before that one have ended, because
        collectives run one after the other.
        """
        return sum(self._kept.values()) + max(self._buffers + self._spread, self._copies)
