"""V-Half: about half of 1F1B's memory (Qi et al. 2024, arXiv:2405.15362)."""

from pipesched.order import Order, Shape, schedule, v
from pipesched.program.generators.building_blocks import repeated


@schedule("v-half", placement=v, chunks_per_rank=2)
def v_half(shape: Shape) -> list[Order]:
    """Each rank has two chunks in a V; all micro-batches repeat one pattern of time slots. V-Half, Qi et al. 2024.

    Stages go down the ranks and up again. The forwards of a micro-batch are planned two slots apart on the way down and
    one slot apart on the way up.

    Every rank holds at most floor((p+2)/2) micro-batches. For equal times and m >= p, the bubble is 3p-4 chunk times
    for odd p, and 3p-7 for even p >= 4.
    """
    p, block = shape.num_ranks, {}
    wait = 0 if p % 2 else 3  # keeps any two passes of a rank from sharing a slot, modulo 6
    for rank in range(p):
        down, up = shape.exactly(2, rank)
        block[down] = 2 * rank, 6 * p + wait - 2 - rank
        block[up] = 3 * p - 2 - rank, 3 * p + wait - 1 + 2 * rank
    return repeated(shape, block, interval=6, max_in_flight=2 * ((p + 2) // 2), early_forwards=wait > 0)
