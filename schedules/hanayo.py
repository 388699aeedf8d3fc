"""Hanayo: waves of stages, down the ranks and up again (Liu et al. 2023, arXiv:2308.15762)."""

from pipesched.order import Order, Shape, schedule, v
from pipesched.program.generators.list_scheduling import backward_first, whole_waves


@schedule("hanayo", placement=v, chunks_per_rank=2)
def hanayo(shape: Shape) -> list[Order]:
    """The stages form n waves, with 2n chunks per rank; each B runs as early as possible. Hanayo, Liu et al. 2023.

    Pass chunks_per_rank=2 for one wave (the default), 4 for two waves, and so on. If both a B and an F are
    ready, the rank runs the B. Where a wave turns, at the first or the last rank, two consecutive stages share a rank
    and exchange no messages.

    The bubble is about (2p-2)/(3pn+p-1) of the makespan for m = p and B = 2F; every rank holds at most p micro-batches.
    """
    whole_waves(shape)
    p = shape.num_ranks
    windows = range(p + 1, 2 * p + 1, max(1, p // 4))
    return backward_first(shape, max_in_flight=p * shape.chunks_per_rank, windows=windows)
