"""ZB-H2: the handcrafted schedule with no bubble, at twice the memory of 1F1B (Qi et al. 2023, arXiv:2401.10241)."""

from pipesched.order import Order, Shape, schedule


@schedule("zb-h2")
def zb_h2(rank: int, shape: Shape) -> Order:
    """The warm-up is twice that of ZB-H1, and weight gradients fill every gap. Zero Bubble, Qi et al. 2023.

    The span bubble, a rank's idle time from its first action to its last, is (p-1) max(0, F+I-2W) if m >= 2p-1 and
    W <= F. Every rank holds at most 2p-1 micro-batches.
    """
    order, m, limit = Order(shape), shape.num_microbatches, 2 * shape.num_ranks - 1
    started = min(m, 2 * (shape.num_ranks - 1 - rank) + 1)
    finished = 0
    for _ in range(started):
        order.F(rank)
    for _ in range(m):
        order.I(rank)
        if started - finished >= limit or started == m:
            order.W(rank)
            finished += 1
        if started < m:
            order.F(rank)
            started += 1
    for _ in range(m - finished):
        order.W(rank)
    return order
