"""GIS: the grouped interleaved schedule with a split backward (PipeOffload, Wan et al. 2025, arXiv:2503.01328)."""

from itertools import zip_longest

from pipesched.order import Order, Shape, loop, schedule


@schedule("gis", placement=loop, chunks_per_rank=2)
def gis(rank: int, shape: Shape) -> Order:
    """Interleaved 1F1B with a split backward, so that a shorter warm-up suffices. PipeOffload, Wan et al. 2025.

    The bubble is (p-1)(F+I)/v if m is a multiple of p; rank r holds ((v-1)p + p-r)/v micro-batches.
    """
    order, (forwards, backwards) = Order(shape), shape.interleaved(rank)
    warm_up = (shape.num_ranks - 1 - rank) + (shape.chunks_per_rank - 1) * shape.groups()[0]
    for chunk in forwards[:warm_up]:
        order.F(chunk)
    for forward, backward in zip_longest(forwards[warm_up:], backwards):
        if forward is not None:
            order.F(forward)
        order.I(backward)
        order.W(backward)
    return order
