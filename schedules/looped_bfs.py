"""Looped BFS: GPipe over several chunks per rank (Breadth-First, Lamy-Poirier 2022, arXiv:2211.05953)."""

from pipesched.order import Order, Shape, loop, schedule


@schedule("looped-bfs", placement=loop, chunks_per_rank=2)
def looped_bfs(rank: int, shape: Shape) -> Order:
    """GPipe over several chunks per rank. Breadth-First, Lamy-Poirier 2022.

    A rank runs the forwards of all micro-batches on one chunk, then on the next, and so on. The backwards run in the
    reverse order of chunks.

    The bubble is (p-1)(F+B)/v for m >= p; every rank holds all micro-batches at once.
    """
    order, chunks = Order(shape), shape.chunks(rank)
    for chunk in chunks:
        for _ in range(shape.num_microbatches):
            order.F(chunk)
    for chunk in reversed(chunks):
        for _ in range(shape.num_microbatches):
            order.B(chunk)
    return order
