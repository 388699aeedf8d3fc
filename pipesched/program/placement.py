"""Placement: assigns stages to ranks. A placement is a tuple with the rank of each stage."""

from collections.abc import Callable, Sequence

from pipesched.errors import ScheduleError

__all__ = ["Placement", "chunks_of", "copy_ranks", "linear", "loop", "table", "v"]

Placement = tuple[int, ...]
#: A function (num_ranks, chunks_per_rank) -> placement.
PlacementRule = Callable[[int, int], Placement]


def linear(num_ranks: int, chunks_per_rank: int = 1) -> Placement:
    """Place consecutive stages on the same rank. With 3 ranks and 2 chunks per rank: 0 0 1 1 2 2."""
    return tuple(rank for rank in range(num_ranks) for _ in range(chunks_per_rank))


def loop(num_ranks: int, chunks_per_rank: int) -> Placement:
    """Place stages round robin (Narayanan et al. 2021). With 3 ranks and 2 chunks per rank: 0 1 2 0 1 2."""
    return tuple(range(num_ranks)) * chunks_per_rank


def v(num_ranks: int, chunks_per_rank: int) -> Placement:
    """Place stages down the ranks and back up (Qi et al. 2023). With 3 ranks and 2 chunks per rank: 0 1 2 2 1 0."""
    down = tuple(range(num_ranks))
    up = tuple(reversed(range(num_ranks)))
    return tuple(rank for chunk in range(chunks_per_rank) for rank in (up if chunk % 2 else down))


def table(ranks: Sequence[int], num_ranks: int) -> Placement:
    """Make a placement from any sequence of ranks, indexed by stage. Raises ScheduleError if a rank does not exist."""
    for stage, rank in enumerate(ranks):
        if not 0 <= rank < num_ranks:
            raise ScheduleError(
                f"stages must be placed on the ranks 0..{num_ranks - 1}; stage {stage} is placed on rank {rank}; "
                f"correct the placement or use more ranks"
            )
    return tuple(ranks)


def chunks_of(placement: Placement, rank: int) -> tuple[int, ...]:
    """Return the chunks of a rank: its stages in ascending order."""
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)


def copy_ranks(placement: Placement, num_ranks: int) -> Placement:
    """Return, for each stage, the rank that holds a copy of the stage: the rank after the stage's own.

    The copy of a stage on the last rank is on rank 0.
    """
    return tuple((rank + 1) % num_ranks for rank in placement)
