"""Candidates: what a plan decides before layers are cut: schedule, ranks, chunks a rank, micro-batches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

from pipesched import schedules
from pipesched.errors import ScheduleError
from pipesched.program.actions import Kind
from pipesched.program.checkpoint_options import Checkpoint, CheckpointMode, checkpoint_by_layer
from pipesched.program.lowering import add_recompute
from pipesched.program.order import Schedule
from pipesched.program.placement import Placement
from pipesched.program.program import Program

__all__ = ["LADDER", "Candidate", "candidates", "microbatch_counts", "smaller_counts", "synchronous"]

LADDER: tuple[CheckpointMode, ...] = ("never", "except_last", "always")  # ever less memory, ever more time
_SIMPLEST = "1f1b"
_CHUNKS = (1, 2, 3, 4)  # a rank: with more of them messages outweigh what the bubble loses
_FEW_RANKS = 8  # up to so many every smaller number of ranks is tried too
_MOST_ROUNDS = 16  # micro-batches a rank: from there on the bubble is a sixteenth of the work
_MOST_COUNTS = 12


@cache
def synchronous() -> tuple[Schedule, ...]:
    """The known schedules that change nothing of what is learned: exact ones, without updates on their way."""
    return tuple(each for each in map(schedules.get, schedules.names()) if _is_exact(each.program(2, 4)))


def _is_exact(program: Program) -> bool:
    return program.exact and not program.has_updates and program.num_weights == program.num_stages


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule for so many ranks and micro-batches; which stage has which layers is left to decide."""

    schedule: Schedule
    num_ranks: int
    num_microbatches: int
    #: Whether the schedule splits backwards.
    splits: bool
    checkpoint: Checkpoint = "never"

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.num_ranks * self.schedule.chunks_per_rank

    @cached_property
    def placement(self) -> Placement:
        """The rank of each stage."""
        return tuple(self.schedule.placement(self.num_ranks, self.schedule.chunks_per_rank))

    @property
    def order(self) -> tuple[int, bool, bool, str, int, int]:
        """The simpler ones first: few chunks, whole backwards, orders that are written and not searched for."""
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
        """How many its program has."""
        return (3 if self.splits else 2) * self.num_stages * self.num_microbatches

    @property
    def offloads(self) -> bool:
        """Whether what some layer keeps waits on the host."""
        return "offload" in checkpoint_by_layer(self.checkpoint).values()

    @property
    def outline(self) -> Program:
        """A program of the same stages on the same ranks, made quickly."""
        quick = schedules.get("looped-bfs").with_options(chunks_per_rank=self.schedule.chunks_per_rank)
        return replace(quick, placement=self.schedule.placement).program(self.num_ranks, self.num_microbatches)

    @cached_property
    def program(self) -> Program:
        """As the schedule writes it."""
        return self.schedule.program(self.num_ranks, self.num_microbatches)

    @cached_property
    def runs(self) -> Program:
        """As it runs, with what is recomputed."""
        return add_recompute(self.program, self.checkpoint)

    @property
    def is_written(self) -> bool:
        """Whether its program has been made."""
        return "program" in self.__dict__

    def recomputing(self, mode: Checkpoint) -> "Candidate":
        """The same with other checkpoints."""
        other = replace(self, checkpoint=mode)
        if self.is_written:
            other.__dict__["program"] = self.program  # which they do not change
        return other


def candidates(
    wished: Schedule | None,
    num_stages: int | None,
    ranks: Iterable[int],
    counts: Iterable[int],
    most_stages: int,
) -> Iterator[Candidate]:
    """Every schedule, or the one that is wished for, with the chunks it can have, for these ranks and micro-batches.

    num_stages: where it is given; at most ``most_stages`` otherwise.
    """
    known = synchronous() if wished is None else (wished,)
    variants = [variant for schedule in known for variant in _variants(schedule, chosen=wished is not None)]
    for num_ranks in ranks:
        for schedule, splits in variants:
            own = num_ranks * schedule.chunks_per_rank
            if own > most_stages or num_stages not in (None, own):
                continue
            if num_ranks == 1 and wished is None and schedule.name != _SIMPLEST:
                continue  # one rank alone: all orders take as long
            yield from (
                Candidate(schedule=schedule, num_ranks=num_ranks, num_microbatches=count, splits=splits)
                for count in counts
            )


def _variants(schedule: Schedule, *, chosen: bool) -> Iterator[tuple[Schedule, bool]]:
    """The schedule with each number of chunks that it takes, and whether it splits backwards."""
    if "chunks_per_rank" not in schedule.options:
        own = [schedule]
    else:
        counts = sorted({schedule.chunks_per_rank, *_CHUNKS})
        own = [schedule.with_options(chunks_per_rank=count) for count in counts if count > 1 or chosen]
    for variant in own:
        try:
            program = variant.program(2, 2)
        except ScheduleError:
            continue
        yield variant, bool(program.columns.are(Kind.W).any())


def smaller_counts(num_ranks: int) -> list[int]:
    """So many ranks, and smaller numbers of them, the largest first."""
    if num_ranks <= _FEW_RANKS:
        return list(range(num_ranks, 0, -1))
    eighths = {num_ranks * share // _FEW_RANKS for share in range(1, _FEW_RANKS + 1)}
    return sorted({1, *eighths}, reverse=True)


def microbatch_counts(batch_size: int, num_ranks: int, sizes: Iterable[int]) -> list[int]:
    """Into how many micro-batches so many rows may be cut, such that each has a size between the smallest and the
    largest that was measured; those that divide the batch, or else keep all ranks busy.
    """
    smallest = min(sizes)
    largest = max(sizes)
    most = min(num_ranks * _MOST_ROUNDS, batch_size)
    found = {count for count in range(1, most + 1) if batch_size % count == 0}
    found |= {num_ranks * rounds for rounds in (1, 2, 4, 8) if num_ranks * rounds <= batch_size}
    fit = sorted(count for count in found if smallest <= -(-batch_size // count) <= largest)
    if len(fit) <= _MOST_COUNTS:
        return fit
    step = (len(fit) - 1) / (_MOST_COUNTS - 1)
    return [fit[round(place * step)] for place in range(_MOST_COUNTS)]
