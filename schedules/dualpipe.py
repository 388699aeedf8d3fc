"""DualPipe: two pipelines in opposite directions over the same weights (DeepSeek-V3, 2024, arXiv:2412.19437)."""

from pipesched.order import Order, Shape, schedule, v
from pipesched.program.generators.dual_pipe import eight_steps


@schedule("dualpipe", placement=v, num_chains=2)
def dualpipe(rank: int, shape: Shape) -> Order:
    """Micro-batches start on the first and last ranks; each F overlaps a B of the other direction. DeepSeek-AI 2024.

    Each rank holds one stage of each direction, so two ranks hold copies of each stage's weights. The gradients of the
    copies are summed after the step.

    In an overlapping pair, the communication of one action is hidden behind the computation of the other action. F&B is
    the time of such a pair.

    For F = I >= W and even m >= 2p, the bubble is (p/2-1)(F&B + B - 3W), and every rank holds at most p + 1
    micro-batches.

    The number of ranks must be even. If m is odd or less than 2p, the order for the next even m >= 2p is used,
    excluding the actions of the extra micro-batches, so ranks idle more.

    Experimental: results agree within rounding only, and a later release may change them.
    """
    half = shape.even_ranks() // 2
    down, up = shape.chunks(rank)
    near, far = (down, up) if rank < half else (up, down)  # near: stage for micro-batches that start at this end
    place = min(rank, shape.num_ranks - 1 - rank)
    count = -(-shape.num_microbatches // 2)
    return eight_steps(Order(shape), near, far, depth=half, place=place, count=count)
