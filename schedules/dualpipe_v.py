"""DualPipeV: DualPipe cut in half, on a V of two chunks per rank (DeepSeek-AI 2025; Qi 2025, "cut-in-half")."""

from pipesched.order import Order, Shape, schedule, v
from pipesched.program.generators.dual_pipe import eight_steps


@schedule("dualpipe-v", placement=v, chunks_per_rank=2)
def dualpipe_v(rank: int, shape: Shape) -> Order:
    """Each rank has two chunks, placed in a V; each F of one chunk overlaps with a B of the other chunk.

    DualPipeV (DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe) combines the V placement of Qi et al. 2023 with the
    order of DualPipe (arXiv:2412.19437): stages go down the ranks and up again. In an overlapping pair, the
    communication of one action is hidden behind the computation of the other action. f, b, i and w are the times of one
    chunk, and f&b is the time of an overlapping pair.

    For f = i >= w and m >= 2p, the bubble is (p-1)(f&b + b - 3w). If overlapping saves no time, this equals
    (p-1)(2f + i - w). Every rank holds at most p + 1/2 micro-batches. With fewer than 2p micro-batches, the order for
    2p is used, excluding the actions of the extra micro-batches, so ranks idle more.
    """
    down, up = shape.exactly(2, rank)
    p, m = shape.num_ranks, shape.num_microbatches
    return eight_steps(Order(shape), down, up, depth=p, place=rank, count=m)
