"""Searched: an order made for given costs, placement and memory limits, by list scheduling and simulated annealing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipesched.order import Order, Schedule, Shape, loop, schedule
from pipesched.program.generators.searched_orders import searched_orders

if TYPE_CHECKING:
    from pipesched.program.program import Program
    from pipesched.simulation.costs import Costs


@schedule("searched", placement=loop, chunks_per_rank=1)
def searched(
    shape: Shape,
    *,
    costs: "Costs | Sequence[Costs] | None" = None,
    placement: Sequence[int] | None = None,
    max_in_flight: int | Sequence[int] | None = None,
    memory_limit_bytes: int | Sequence[int] | None = None,
    effort: float = 1,
    starts: "Sequence[Schedule | Program]" = (),
) -> list[Order]:
    """The shortest order that a search finds for the given stage costs, placement and limits.

    The search starts from list schedules and from all other schedules that fit, improves the best of them by simulated
    annealing, and stops at a bound that no order can beat. Each backward is whole or split, whichever is better. If a
    known schedule is as short, it is used. Equal options give equal orders.

    Option costs: the times of each stage, or a list with the costs of each micro-batch (default: identical stages).

    Option placement: the rank of each stage (default: round robin, as in interleaved 1F1B).

    Option max_in_flight: the most (stage, micro-batch) pairs that a rank is allowed to hold at the same time, or a list
    with the limit of each rank (default: no limit).

    Option memory_limit_bytes: the most bytes that the micro-batches of a rank are allowed to hold at the same time, as
    ``Trace.peak_bytes`` counts them, or a list with the limit of each rank (default: no limit).

    Option effort: the number of steps of the search, relative to the default.

    Option starts: schedules and programs to start from (default: all other schedules).
    """
    del placement  # it is part of the shape
    return searched_orders(
        shape,
        costs,
        max_in_flight=max_in_flight,
        memory_limit_bytes=memory_limit_bytes,
        effort=effort,
        starts=starts,
    )
