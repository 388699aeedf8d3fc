"""ZB-V: zero bubble, two chunks per rank in a V, within 1F1B's memory (Qi et al. 2023, arXiv:2401.10241, section 6)."""

from pipesched.order import Order, Shape, schedule, v


@schedule("zb-v", placement=v, chunks_per_rank=2)
def zb_v(rank: int, shape: Shape) -> Order:
    """Each rank has two chunks in a V: rank 0 holds the first and the last stage. ZB-V, Qi et al. 2023.

    The span bubble, a rank's idle time from its first action to its last, is at most (p-1)(I-W) if W <= F <= I, and 0
    for equal times. Every rank holds at most p micro-batches. With fewer than 2p-1 micro-batches, the order for 2p-1 is
    used, excluding the actions of the extra micro-batches, so ranks idle more.
    """
    order, (down, up) = Order(shape), shape.exactly(2, rank)
    p, ahead = shape.num_ranks, shape.num_ranks - rank
    for _ in range(2 * ahead - 1):  # warm-up
        order.F(down)
    for _ in range(rank):
        order.F(up)
        order.F(down)
    for _ in range(ahead):
        order.F(up)
        order.I(up)
        order.W(up)
    for _ in range(max(0, max(2 * p - 1, shape.num_microbatches) - p)):  # steady state
        order.F(down)
        order.I(down)
        order.W(down)
        order.F(up)
        order.I(up)
        order.W(up)
    for _ in range(rank):  # cool-down
        order.I(down)
        order.I(up)
    for _ in range(ahead):
        order.I(down)
        order.W(down)
    for _ in range(rank):
        order.W(up)
    for _ in range(rank):
        order.W(down)
    return order
