"""Dual pipe: the order of DualPipe and DualPipeV, where each rank sends micro-batches both ways (DeepSeek-AI 2024)."""

from collections import deque

from pipesched.program.order import Order

__all__ = ["eight_steps"]


def eight_steps(order: Order, near: int, far: int, *, depth: int, place: int, count: int) -> Order:
    """Write one rank's order: its forwards of one stage overlap with its backwards of the other one.

    near, far: the rank's two stages; micro-batches reach ``near`` first. depth: how many ranks lie between an end and
    the turning point; place: this one's, from 0. count: the micro-batches that go each way; steps are stated for
    2 x depth and more, for fewer they drop what is not there. DeepSeek-V3, arXiv:2412.19437, and its open source.
    """
    ahead = depth - 1 - place
    count = max(count, 2 * depth)
    left = _Left(order)
    for _ in range(2 * ahead):  # 1: forwards
        order.F(near)
    for _ in range(place + 1):  # 2: forwards of both
        order.F(near)
        order.F(far)
    for _ in range(ahead):  # 3: zero bubble
        left.I(far)
        left.W()
        order.F(far)
    for round_ in range(count - 2 * depth + place + 1):  # 4: forwards and backwards overlap
        if round_ or ahead:
            order.overlap(near, far)
        else:  # one after the other here makes the bubble smaller
            order.F(near)
            order.B(far)
        order.overlap(far, near)
    for _ in range(ahead):  # 5: the last forwards
        order.B(far)
        order.overlap(far, near)
    for back in range(2 * (place + 1)):  # 6: backwards of both, the second half split
        stage = near if back % 2 else far
        (left.I if back > place else order.B)(stage)
    for _ in range(ahead):  # 7: zero bubble
        left.W()
        left.I(near)
    for _ in range(place + 1):  # 8: what is left
        left.W()
    return order


class _Left:
    """Weight gradients that wait, of both stages, first in, first out."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._waiting: deque[int] = deque()

    def I(self, stage: int) -> None:  # noqa: E743
        """Split: the weight gradient waits."""
        self._order.I(stage)
        self._waiting.append(stage)

    def W(self) -> None:
        """The weight gradient that has waited longest."""
        self._order.W(self._waiting.popleft())
