"""Seq1F1B: 1F1B over token slices of causal models (Sun et al. 2024, arXiv:2406.03488)."""

from pipesched.order import Order, Shape, schedule


@schedule("seq1f1b", slices_per_microbatch=2)
def seq1f1b(rank: int, shape: Shape) -> Order:
    """1F1B whose units are k slices of a sequence, the later ones attending to the earlier. Seq1F1B, Sun et al. 2024.

    Backwards take a micro-batch's slices from the last to the first. Costs are those of one slice.

    Bubble (p-1)(F+B)/k for slices of equal time; rank r holds (p-1-r+k)/k micro-batches. Programs of it are checked,
    drawn and simulated; running one needs layers that keep what earlier slices left, which no layer says of itself.
    """
    order = Order(shape)
    for _ in range(shape.num_ranks - 2 - rank + shape.slices_per_microbatch):
        order.F(rank)
    for _ in range(shape.num_microbatches):
        order.F(rank)
        order.B(rank)
    return order
