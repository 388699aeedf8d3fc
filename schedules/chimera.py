"""Chimera: two pipelines in opposite directions over the same weights (Li & Hoefler 2021, arXiv:2107.06925)."""

from pipesched.order import Order, Shape, schedule, v


@schedule("chimera", placement=v, num_chains=2)
def chimera(rank: int, shape: Shape) -> Order:
    """Half of each p micro-batches start at either end, so that each way fills the other's gaps. Li & Hoefler 2021.

    Each rank holds its part of the model for both directions: twice the weights, whose gradients are summed after the
    step. In slots of a forward, the k-th micro-batch of a direction runs on its s-th stage forward in slot s + 2k and
    backward in slot 2p-1-s + 2k; the next unit follows 2p slots later.

    Bubble (p-2)F for B = F, (m/p+1)(p-2)F for B = 2F and m = 2p, 3p, ... (2(p-2)F for m = p); ranks hold p/2+1 to p
    micro-batches. For an even number of ranks; m may be any number, the last unit then has gaps.
    """
    order, p = Order(shape), shape.even_ranks()
    slots: list[tuple[int, bool, int]] = []
    for nth, stage in enumerate(shape.chunks(rank)):
        place = p - 1 - rank if nth else rank  # on its own way
        for unit in range(0, -(-shape.num_microbatches // p) * 2 * p, 2 * p):
            for slot in range(unit, unit + p, 2):
                slots += [(slot + place, False, stage), (slot + 2 * p - 1 - place, True, stage)]
    for _, back, stage in sorted(slots):
        (order.B if back else order.F)(stage)
    return order
