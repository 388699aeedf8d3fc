"""Seq1F1B: 1F1B over token slices of causal models (Sun et al. 2024, arXiv:2406.03488)."""

from pipesched.order import Order, Shape, schedule


@schedule("seq1f1b", slices_per_microbatch=2)
def seq1f1b(rank: int, shape: Shape) -> Order:
    """1F1B over k token slices of each micro-batch; later slices attend to earlier ones. Seq1F1B, Sun et al. 2024.

    The forwards of a micro-batch run from its first slice to its last, the backwards from the last to the first. Costs
    are per slice.

    The bubble is (p-1)(F+B)/k if all slices take the same time; rank r holds (p-1-r+k)/k micro-batches. The schedule's
    programs can be validated, drawn and simulated, but not run, because layers would have to keep the keys and values
    of earlier slices.
    """
    order = Order(shape)
    for _ in range(shape.num_ranks - 2 - rank + shape.slices_per_microbatch):
        order.F(rank)
    for _ in range(shape.num_microbatches):
        order.F(rank)
        order.B(rank)
    return order
