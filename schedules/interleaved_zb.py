"""Interleaved zero bubble: interleaved 1F1B with a split backward (Qi et al. 2023, arXiv:2401.10241)."""

from itertools import zip_longest

from pipesched.order import Order, Shape, loop, schedule


@schedule("interleaved-zb", placement=loop, chunks_per_rank=2)
def interleaved_zb(rank: int, shape: Shape) -> Order:
    """Interleaved 1F1B with a cool-down filled by weight gradients. Qi et al. 2023.

    On rank r, each weight gradient is computed r backward passes after the corresponding input gradient.

    The bubble is (p-1)(F+I-min(F,W))/v if m is a multiple of p; every rank holds at most p micro-batches.
    """
    order, (forwards, backwards) = Order(shape), shape.interleaved(rank)
    warm_up = (shape.num_ranks - 1 - rank) + (shape.chunks_per_rank - 1) * shape.groups()[0]
    for chunk in forwards[:warm_up]:
        order.F(chunk)
    for step, (forward, backward) in enumerate(zip_longest(forwards[warm_up:], backwards)):
        if forward is not None:
            order.F(forward)
        order.I(backward)
        if step >= rank:
            order.W(backwards[step - rank])
    for chunk in backwards[max(0, len(backwards) - rank) :]:
        order.W(chunk)
    return order
