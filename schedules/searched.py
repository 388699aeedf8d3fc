"""Searched: an order found for given costs, placement and limits by list scheduling and simulated annealing."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipesched.order import Order, Schedule, Shape, loop, schedule
from pipesched.program.generators.searched_orders import searched_orders, shortened_orders

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
    found: "Program | None" = None,
) -> list[Order]:
    """The shortest order that a search finds for the given stage costs, placement and limits.

    The search starts from greedy orders and all other schedules that fit, and improves the best orders by simulated
    annealing. It stops once it proves that no order is shorter. With many equal micro-batches, orders may repeat a
    unit. A backward may be split. Of equally short orders, a known schedule is used. Equal inputs give equal orders.

    Options:
        costs: the times of each stage, or a list with the costs of each micro-batch. Default: identical stages.
        placement: the rank of each stage. Default: round robin.
        max_in_flight: the maximum ``Trace.peak_in_flight`` of a rank: one number, or one per rank. Default: no limit.
        memory_limit_bytes: the maximum ``Trace.peak_bytes`` of a rank: one number, or one per rank. Default: no limit.
        effort: the number of search steps, relative to the default. Default: 1.
        starts: schedules and programs to start from. Default: all other schedules.
        found: the program of an earlier search. If it has at least as many micro-batches as needed, its orders are
            used without a search, and surplus micro-batches at the end are dropped. Default: none.
    """
    if found is not None and shape.num_microbatches <= found.num_microbatches:
        return shortened_orders(shape, found)
    limits = {"max_in_flight": max_in_flight, "memory_limit_bytes": memory_limit_bytes}
    return searched_orders(shape, costs, limits=limits, effort=effort, starts=starts)
