"""Interleaved 1F1B: several chunks per rank (Megatron-LM, Narayanan et al. 2021, arXiv:2104.04473)."""

from itertools import zip_longest

from pipesched.order import Order, Shape, loop, schedule


@schedule("interleaved-1f1b", placement=loop, chunks_per_rank=2)
def interleaved_1f1b(rank: int, shape: Shape) -> Order:
    """1F1B over v chunks per rank, to make the bubble v times smaller. Megatron-LM, Narayanan et al. 2021.

    Micro-batches run in groups of p or more. The forward passes of a group run chunk by chunk; its backward passes
    run in the reverse order of chunks.

    The bubble is (p-1)(F+B)/v; rank 0 holds p + (p-1)/v micro-batches.
    """
    order, (forwards, backwards) = Order(shape), shape.interleaved(rank)
    warm_up = 2 * (shape.num_ranks - 1 - rank) + (shape.chunks_per_rank - 1) * shape.groups()[0]
    for chunk in forwards[:warm_up]:
        order.F(chunk)
    for forward, backward in zip_longest(forwards[warm_up:], backwards):
        if forward is not None:
            order.F(forward)
        order.B(backward)
    return order
