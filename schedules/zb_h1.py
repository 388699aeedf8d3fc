"""ZB-H1: the handcrafted zero-bubble schedule within 1F1B's memory (Qi et al. 2023, arXiv:2401.10241)."""

from pipesched.order import Order, Shape, schedule


@schedule("zb-h1")
def zb_h1(rank: int, shape: Shape) -> Order:
    """1F1B with a split backward; weight gradients fill the cool-down. Zero Bubble, Qi et al. 2023.

    rank 0 | F0 F1       I0 W0 F2 I1 W1 F3 I2 W2    I3 W3
    rank 1 |    F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3

    The bubble is (p-1)(F+I-W); every rank holds at most p micro-batches.
    """
    order = Order(shape)
    for _ in range(shape.num_ranks - 1 - rank):
        order.F(rank)
    for microbatch in range(shape.num_microbatches):
        order.F(rank)
        order.I(rank)
        if microbatch >= rank:
            order.W(rank)
    for _ in range(rank):
        order.W(rank)
    return order
