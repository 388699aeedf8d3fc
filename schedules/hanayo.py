"""Hanayo: waves of stages, down the ranks and up again (Liu et al. 2023, arXiv:2308.15762)."""

from pipesched.order import Order, Shape, schedule, v
from pipesched.program.generators.list_scheduling import backward_first, whole_waves


@schedule("hanayo", placement=v, chunks_per_rank=2)
def hanayo(shape: Shape) -> list[Order]:
    """W waves: 2W chunks a rank in zig-zag, and backwards as soon as they can run. Hanayo, Liu et al. 2023.

    One wave unless chunks_per_rank is 4 (two waves), 6, ... Each action as early as it can start, whole backwards
    first; the waves turn on the first and the last rank, where a message costs nothing.

    Bubble of about (2p-2)/(3pW+p-1) of the makespan for m = p and B = 2F; every rank holds p micro-batches at most.
    """
    whole_waves(shape)
    p = shape.num_ranks
    windows = range(p + 1, 2 * p + 1, max(1, p // 4))
    return backward_first(shape, max_in_flight=p * shape.chunks_per_rank, windows=windows)
