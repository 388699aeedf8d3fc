"""V-Min: about a third of 1F1B's memory (Qi et al. 2024, arXiv:2405.15362)."""

from pipesched.order import Order, Shape, schedule, v
from pipesched.program.generators.building_blocks import repeated


@schedule("v-min", placement=v, chunks_per_rank=2)
def v_min(shape: Shape) -> list[Order]:
    """Each rank has two chunks in a V; all micro-batches repeat one tightly packed pattern. V-Min, Qi et al. 2024.

    Stages go down the ranks and up again. The forward passes of a micro-batch are planned in consecutive slots, and
    so are its backward passes.

    Every rank holds at most floor((p+4)/3) micro-batches. For equal times and m >= p, the bubble is 4p-5 chunk times,
    or 4p-7 if p is a multiple of 3. With unequal times, the bubble grows with m.
    """
    p, block = shape.num_ranks, {}
    wait = 0 if p % 3 else 2  # keeps any two passes of a rank from sharing a slot, modulo 6
    for rank in range(p):
        down, up = shape.exactly(2, rank)
        block[down] = rank, 4 * p + wait - 1 - rank
        block[up] = 2 * p - 1 - rank, 2 * p + wait + rank
    return repeated(shape, block, interval=6, max_in_flight=2 * ((p + 4) // 3), early_forwards=wait > 0)
