"""PipeDream: asynchronous 1F1B, one update per micro-batch (Narayanan et al. 2019, SOSP, arXiv:1806.03377)."""

from pipesched.order import Order, Shape, schedule


@schedule("pipedream")
def pipedream(rank: int, shape: Shape, *, vertical_sync: bool = False) -> Order:
    """1F1B without a drain between steps, and with an update after every backward. PipeDream, Narayanan et al. 2019.

    Rank r computes with weights that are p-1-r updates old. A micro-batch's forward and backward use the same version,
    so rank r stashes p-r versions. With vertical_sync=True, all ranks use weights p-1 updates old, like rank 0.

    There is no bubble in the steady state; rank r holds p-r micro-batches.

    Experimental: steps overlap, and a later release may change the results.
    """
    order, oldest = Order(shape), shape.num_ranks - 1
    ahead = oldest - rank
    for number in range(shape.num_microbatches + ahead):
        order.F(rank, version=max(0, number - oldest) if vertical_sync else None)
        if number >= ahead:
            order.B(rank)
            order.UPDATE(rank)
    return order
