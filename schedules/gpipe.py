"""GPipe: all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965)."""

from pipesched.order import Order, Shape, schedule


@schedule("gpipe")
def gpipe(rank: int, shape: Shape) -> Order:
    """All forward passes run first, then all backward passes. GPipe, Huang et al. 2019.

    rank 0 | F0 F1 F2 F3             B0 B1 B2 B3
    rank 1 |    F0 F1 F2 F3       B0 B1 B2 B3

    The bubble is (p-1)(F+B); every rank holds all micro-batches at once.
    """
    order = Order(shape)
    for _ in range(shape.num_microbatches):
        order.F(rank)
    for _ in range(shape.num_microbatches):
        order.B(rank)
    return order
