"""PipeDream-2BW: asynchronous 1F1B with two versions of the weights (Narayanan et al. 2021, arXiv:2006.09503)."""

from pipesched.order import Order, Shape, schedule


@schedule("pipedream-2bw")
def pipedream_2bw(rank: int, shape: Shape) -> Order:
    """1F1B without a drain between steps, on weights that are one step old. PipeDream-2BW, Narayanan et al. 2021.

    The gradients of a step's micro-batches are summed and applied at the end of the step. The next step still uses the
    weights from before this update. If a step has at least p-1 micro-batches, every rank holds two versions of its
    weights; with fewer micro-batches, ranks also use and hold older versions.

    There is no bubble in the steady state; rank r holds p-r micro-batches.

    Experimental: steps overlap, and a later release may change the results.
    """
    order, ahead = Order(shape), shape.num_ranks - 1 - rank
    step = shape.num_microbatches // shape.num_steps
    delay = max(1, -(-(shape.num_ranks - 1) // step))
    versions = [max(0, number // step - delay) for number in range(shape.num_microbatches)]
    for version in versions[:ahead]:
        order.F(rank, version=version)
    for number in range(shape.num_microbatches):
        if ahead + number < shape.num_microbatches:
            order.F(rank, version=versions[ahead + number])
        order.B(rank)
        if (number + 1) % step == 0:
            order.UPDATE(rank)
    return order
