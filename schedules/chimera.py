"""Chimera: two pipelines in opposite directions over the same weights (Li & Hoefler 2021, arXiv:2107.06925)."""

from pipesched.order import Order, Shape, schedule, v


@schedule("chimera", placement=v, num_chains=2)
def chimera(rank: int, shape: Shape) -> Order:
    """Two pipelines run in opposite directions, and each fills the other's bubbles. Li & Hoefler 2021.

    Of every p micro-batches, half start at rank 0 and half at rank p-1. Each rank holds one stage of each direction, so
    two ranks hold copies of each stage's weights. The gradients of the copies are summed after the step.

    If time is divided into slots as long as a forward, the k-th micro-batch of a direction runs its forward on stage s
    in slot s + 2k and its backward in slot 2p-1-s + 2k. The next p micro-batches follow 2p slots later.

    If m is a multiple of p, the bubble is (p-2)F for B = F, and (m/p+1)(p-2)F for B = 2F. Otherwise, ranks also idle in
    the slots of the missing micro-batches. Ranks hold p/2+1 to p micro-batches. The number of ranks must be even.

    Experimental: results agree within rounding only, and a later release may change them.
    """
    order, p = Order(shape), shape.even_ranks()
    slots: list[tuple[int, bool, int]] = []
    for nth, stage in enumerate(shape.chunks(rank)):
        place = p - 1 - rank if nth else rank  # position of the stage in its direction
        for unit in range(0, -(-shape.num_microbatches // p) * 2 * p, 2 * p):
            for slot in range(unit, unit + p, 2):
                slots += [(slot + place, False, stage), (slot + 2 * p - 1 - place, True, stage)]
    for _, back, stage in sorted(slots):
        (order.B if back else order.F)(stage)
    return order
