"""Eager 1F1B: 1F1B with more forwards in flight, to hide communication (Zhuang et al. 2022, arXiv:2211.05322)."""

from pipesched.order import Order, Shape, schedule


@schedule("eager-1f1b")
def eager_1f1b(rank: int, shape: Shape) -> Order:
    """1F1B with twice the warm-up, so that messages travel while ranks compute. Eager 1F1B, Zhuang et al. 2022.

    rank 0 | F0 F1 F2 B0 F3 B1    B2    B3
    rank 1 |    F0 B0 F1 B1 F2 B2 F3 B3

    The bubble is (p-1)(F+B), as in 1F1B, plus 2(p-1)c if a message takes c <= (F+B)/2. Rank r holds 2(p-1-r)+1
    micro-batches.
    """
    order = Order(shape)
    for _ in range(2 * (shape.num_ranks - 1 - rank)):
        order.F(rank)
    for _ in range(shape.num_microbatches):
        order.F(rank)
        order.B(rank)
    return order
