"""Dual pipe: the order of DualPipe and DualPipeV, whose micro-batches run in both directions (DeepSeek-AI 2024)."""

from collections import deque

from pipesched.program.order import Order

__all__ = ["eight_steps"]


def eight_steps(order: Order, near: int, far: int, *, depth: int, place: int, count: int) -> Order:
    """Write the order of a rank with two stages: forwards of one stage overlap with backwards of the other stage.

    The eight steps are those of DeepSeek-V3 (arXiv:2412.19437) and its published code.

    Args:
        order: the empty order to write to.
        near: the rank's stage for micro-batches on their way to the middle of the pipeline.
        far: the rank's stage for micro-batches on their way from the middle to an end.
        depth: the number of ranks from an end of the pipeline to its middle.
        place: the number of ranks between this rank and that end of the pipeline.
        count: the number of micro-batches in each direction. If it is below 2 x depth, the order for 2 x depth
            micro-batches is written, excluding the actions of the extra micro-batches.

    """
    ahead = depth - 1 - place
    count = max(count, 2 * depth)
    left = _Left(order)
    for _ in range(2 * ahead):  # 1: forwards
        order.F(near)
    for _ in range(place + 1):  # 2: forwards of both stages
        order.F(near)
        order.F(far)
    for _ in range(ahead):  # 3: zero bubble
        left.I(far)
        left.W()
        order.F(far)
    for round_ in range(count - 2 * depth + place + 1):  # 4: each F overlaps with a B
        if round_ or ahead:
            order.overlap(near, far)
        else:  # not overlapped: this makes the bubble smaller
            order.F(near)
            order.B(far)
        order.overlap(far, near)
    for _ in range(ahead):  # 5: the last forwards
        order.B(far)
        order.overlap(far, near)
    for back in range(2 * (place + 1)):  # 6: B of both stages; the second half is split into I and W
        stage = near if back % 2 else far
        (left.I if back > place else order.B)(stage)
    for _ in range(ahead):  # 7: zero bubble
        left.W()
        left.I(near)
    for _ in range(place + 1):  # 8: the remaining weight gradients
        left.W()
    return order


class _Left:
    """A first-in, first-out queue of the weight gradients of both stages that have not been written yet."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._waiting: deque[int] = deque()

    def I(self, stage: int) -> None:  # noqa: E743
        """Write an I, and queue its weight gradient."""
        self._order.I(stage)
        self._waiting.append(stage)

    def W(self) -> None:
        """Write the oldest queued weight gradient."""
        self._order.W(self._waiting.popleft())
