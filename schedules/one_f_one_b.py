"""1F1B: one forward, one backward (PipeDream-Flush, Narayanan et al. 2021, arXiv:2006.09503)."""

from pipesched.order import Order, Shape, schedule


@schedule("1f1b")
def one_f_one_b(rank: int, shape: Shape) -> Order:
    """After a short warm-up, forwards and backwards alternate. PipeDream-Flush, Narayanan et al. 2021.

    rank 0 | F0 F1    B0 F2 B1 F3 B2    B3
    rank 1 |    F0 B0 F1 B1 F2 B2 F3 B3

    The bubble is (p-1)(F+B), as in GPipe, but rank r holds only p-r micro-batches.
    """
    order = Order(shape)
    for _ in range(shape.num_ranks - 1 - rank):
        order.F(rank)
    for _ in range(shape.num_microbatches):
        order.F(rank)
        order.B(rank)
    return order
