"""Candidates: combinations of a schedule with numbers of ranks, chunks and micro-batches for a search to evaluate."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

from pipesched import schedules
from pipesched.errors import ScheduleError
from pipesched.program.actions import Kind
from pipesched.program.checkpoint_options import Checkpoint, CheckpointMode, checkpoint_by_layer
from pipesched.program.order import Schedule
from pipesched.program.placement import Placement
from pipesched.program.program import Program

__all__ = ["CHUNKS", "LADDER", "Candidate", "candidates", "microbatch_counts", "smaller_counts", "synchronous"]

# Each setting needs less memory and more time than the previous setting.
LADDER: tuple[CheckpointMode, ...] = ("never", "except_last", "always")
_SIMPLEST = "1f1b"
CHUNKS = (1, 2, 3, 4)  # chunks per rank to try: with more, the extra messages cost more than the smaller bubble saves
_FEW_RANKS = 8  # up to this many ranks, every smaller number of ranks is tried too
_MOST_ROUNDS = 16  # limit on num_microbatches / num_ranks: at 16, the bubble is only a sixteenth of the work
_MOST_COUNTS = 12  # at most this many numbers of micro-batches are tried


@cache
def synchronous() -> tuple[Schedule, ...]:
    """Return the registered schedules that do not change training results.

    These schedules add gradients in ascending order of micro-batches, and do not update weights inside a step.
    Schedules that search for an order, starting from other schedules, are left out.
    """
    fixed = [known for known in map(schedules.get, schedules.names()) if "starts" not in known.options]
    return tuple(known for known in fixed if _is_exact(known.program(2, 4)))


def _is_exact(program: Program) -> bool:
    return program.exact and not program.has_updates and program.num_weights == program.num_stages


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule, and the numbers of ranks and micro-batches. The layers are not yet assigned to stages."""

    schedule: Schedule
    num_ranks: int
    num_microbatches: int
    #: Whether the schedule splits each B into I and W.
    splits: bool
    checkpoint: Checkpoint = "never"

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.num_ranks * self.schedule.chunks_per_rank

    @cached_property
    def placement(self) -> Placement:
        """The rank of each stage."""
        fixed = self.schedule.fixed_placement
        return fixed or tuple(self.schedule.placement(self.num_ranks, self.schedule.chunks_per_rank))

    @property
    def order(self) -> tuple[int, bool, bool, str, int, int]:
        """A sort key that puts simpler candidates first.

        Simpler candidates have fewer chunks, do not split the backward pass, or need no search for an order.
        """
        return (
            self.schedule.chunks_per_rank,
            self.splits,
            self.schedule.searches,
            self.schedule.name,
            self.num_ranks,
            self.num_microbatches,
        )

    @property
    def num_actions(self) -> int:
        """The number of actions in the candidate's program, excluding recomputes."""
        return (3 if self.splits else 2) * self.num_stages * self.num_microbatches

    @property
    def offloads(self) -> bool:
        """Whether the activations of some layer are offloaded to the host."""
        return "offload" in checkpoint_by_layer(self.checkpoint).values()

    @property
    def outline(self) -> Program:
        """A program with the same stages and placement, but with an order of actions that is quick to create."""
        quick = schedules.get("looped-bfs").with_options(chunks_per_rank=self.schedule.chunks_per_rank)
        return replace(quick, placement=lambda *_: self.placement).program(self.num_ranks, self.num_microbatches)

    @cached_property
    def program(self) -> Program:
        """The program that the schedule creates, without recomputes."""
        return self.schedule.program(self.num_ranks, self.num_microbatches)

    @property
    def is_written(self) -> bool:
        """Whether ``program`` has already been created."""
        return "program" in self.__dict__

    def recomputing(self, mode: Checkpoint) -> "Candidate":
        """Return a copy with another checkpoint setting."""
        other = replace(self, checkpoint=mode)
        if self.is_written:
            other.__dict__["program"] = self.program  # the checkpoint setting does not change the program
        return other


def candidates(
    wished: Schedule | None,
    num_stages: int | None,
    ranks: Iterable[int],
    counts: Iterable[int],
    most_stages: int,
) -> Iterator[Candidate]:
    """Yield all candidates for these numbers of ranks and micro-batches.

    Args:
        wished: the schedule to use, or None for every synchronous schedule.
        num_stages: the number of stages, or None for any number.
        ranks: the numbers of ranks to try.
        counts: the numbers of micro-batches to try.
        most_stages: the maximum number of stages.

    """
    known = synchronous() if wished is None else (wished,)
    variants = [variant for schedule in known for variant in _variants(schedule, chosen=wished is not None)]
    for num_ranks in ranks:
        for schedule, splits in variants:
            stages = num_ranks * schedule.chunks_per_rank
            if stages > most_stages or num_stages not in (None, stages):
                continue
            if num_ranks == 1 and wished is None and schedule.name != _SIMPLEST:
                continue  # on one rank all orders take the same time
            yield from (
                Candidate(schedule=schedule, num_ranks=num_ranks, num_microbatches=count, splits=splits)
                for count in counts
            )


def _variants(schedule: Schedule, *, chosen: bool) -> Iterator[tuple[Schedule, bool]]:
    """For each number of chunks to try, yield the schedule, and whether the schedule splits the backward pass.

    If the user has set the number of chunks with ``with_options``, only this number is tried.
    """
    if "chunks_per_rank" not in schedule.options:
        variants = [schedule]
    else:
        given = schedule.chunks_per_rank
        counts = [given] if chosen and "chunks_per_rank" in schedule.given else sorted({given, *CHUNKS})
        variants = [schedule.with_options(chunks_per_rank=count) for count in counts if count > 1 or chosen]
    for variant in variants:
        try:
            program = variant.program(2, 2)
        except ScheduleError:
            continue
        yield variant, bool(program.columns.are(Kind.W).any())


def smaller_counts(num_ranks: int) -> list[int]:
    """Return the numbers of ranks to try, up to ``num_ranks``, largest first."""
    if num_ranks <= _FEW_RANKS:
        return list(range(num_ranks, 0, -1))
    eighths = {num_ranks * share // _FEW_RANKS for share in range(1, _FEW_RANKS + 1)}
    return sorted({1, *eighths}, reverse=True)


def microbatch_counts(batch_size: int, num_ranks: int, sizes: Iterable[int]) -> list[int]:
    """Return the numbers of micro-batches to try for a batch.

    Each number divides the batch evenly or is a multiple of the number of ranks. The resulting micro-batch size is
    within the range of the measured sizes.

    Args:
        batch_size: the number of rows in a batch.
        num_ranks: the number of ranks.
        sizes: the measured micro-batch sizes, in rows.

    """
    smallest = min(sizes)
    largest = max(sizes)
    most = min(num_ranks * _MOST_ROUNDS, batch_size)
    counts = {count for count in range(1, most + 1) if batch_size % count == 0}
    counts |= {num_ranks * rounds for rounds in (1, 2, 4, 8) if num_ranks * rounds <= batch_size}
    fit = sorted(count for count in counts if smallest <= -(-batch_size // count) <= largest)
    if len(fit) <= _MOST_COUNTS:
        return fit
    step = (len(fit) - 1) / (_MOST_COUNTS - 1)
    return [fit[round(place * step)] for place in range(_MOST_COUNTS)]
