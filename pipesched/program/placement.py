"""Placement: which rank holds which stage. A placement is a tuple of ranks, indexed by stage."""

from collections.abc import Callable, Sequence

from pipesched.errors import ScheduleError

__all__ = ["Placement", "chunks_of", "linear", "loop", "table", "v"]

Placement = tuple[int, ...]
#: (num_ranks, chunks_per_rank) -> placement
PlacementRule = Callable[[int, int], Placement]


def linear(num_ranks: int, chunks_per_rank: int = 1) -> Placement:
    """Neighbouring stages share a rank: with 2 chunks 0 0 1 1 2 2."""
    return tuple(rank for rank in range(num_ranks) for _ in range(chunks_per_rank))


def loop(num_ranks: int, chunks_per_rank: int) -> Placement:
    """Stages go round the ranks: with 2 chunks 0 1 2 0 1 2 (Narayanan et al. 2021)."""
    return tuple(range(num_ranks)) * chunks_per_rank


def v(num_ranks: int, chunks_per_rank: int) -> Placement:
    """Stages go down the ranks and up again: with 2 chunks 0 1 2 2 1 0 (Qi et al. 2023)."""
    down = tuple(range(num_ranks))
    up = tuple(reversed(range(num_ranks)))
    return tuple(rank for chunk in range(chunks_per_rank) for rank in (up if chunk % 2 else down))


def table(ranks: Sequence[int], num_ranks: int) -> Placement:
    """Any table of ranks, indexed by stage. Raises ScheduleError where a rank does not exist."""
    for stage, rank in enumerate(ranks):
        if not 0 <= rank < num_ranks:
            raise ScheduleError(
                f"a stage lies on one of the ranks 0..{num_ranks - 1}; stage {stage} is placed on rank {rank}; "
                f"correct the placement or raise the number of ranks"
            )
    return tuple(ranks)


def chunks_of(placement: Placement, rank: int) -> tuple[int, ...]:
    """The stages that a rank holds, in stage order: its chunks."""
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)
