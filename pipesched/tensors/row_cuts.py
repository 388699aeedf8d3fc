"""Row cuts: divides a tensor by rows, so that elementwise updates of the pieces and of the whole are bit-identical.

A CPU kernel processes most elements in groups with vector instructions, and the last elements one by one. The two code
paths can round differently. So every piece starts at a multiple of 64 elements, which is a multiple of every group
size.
"""

import math
from collections.abc import Sequence

__all__ = ["row_cuts"]

_ALIGNED = 64  # elements


def row_cuts(shape: Sequence[int], num_pieces: int) -> list[tuple[int, int]] | None:
    """Return (first row, last row + 1) for each piece, or None if the tensor has too few rows.

    The pieces have almost the same number of rows, and longer pieces come last.
    """
    if not shape or 0 in shape:
        return None
    step = _ALIGNED // math.gcd(_ALIGNED, math.prod(shape[1:]))
    steps = shape[0] // step
    if steps < num_pieces:
        return None
    starts = [steps * piece // num_pieces * step for piece in range(num_pieces)]
    return list(zip(starts, [*starts[1:], shape[0]], strict=True))
