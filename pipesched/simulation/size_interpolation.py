"""Size interpolation: estimates a time or size of a layer for a micro-batch size that was not measured."""

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["figure_at"]

_TINY = 1e-6  # values below this fraction of the largest value are treated as zero
_ENOUGH = 4  # sizes needed to compare the methods; without the middle one of three sizes, both use the same line


def figure_at(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    """Estimate a time or size of a layer for a micro-batch size. The result is never negative.

    For a measured size, the measured value is returned. For other sizes there are two methods: the line through the two
    nearest measured sizes, and the line that minimises the sum of squared relative errors at all measured sizes.

    To choose a method, each measured size except the smallest and the largest is left out in turn. The method that
    predicts the omitted values better is used. With fewer than four sizes, or values near zero, the first method is
    used. With a single measured size, the value is assumed to be proportional to the size.

    Args:
        sizes: the measured micro-batch sizes in rows, ascending.
        values: the measured value at each size.
        size: the micro-batch size to estimate the value for.

    """
    if size in sizes:
        return values[sizes.index(size)]
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    return max(0.0, (_on_line if _is_line(sizes, values) else _nearest)(sizes, values, size))


def _is_line(sizes: Sequence[int], values: Sequence[float]) -> bool:
    if len(sizes) < _ENOUGH or min(values) <= _TINY * max(values):
        return False
    wrong = {_nearest: 0.0, _on_line: 0.0}
    for at in range(1, len(sizes) - 1):
        others = [*sizes[:at], *sizes[at + 1 :]], [*values[:at], *values[at + 1 :]]
        for way in wrong:
            wrong[way] += abs(way(*others, sizes[at]) / values[at] - 1)
    return wrong[_on_line] < wrong[_nearest]


def _nearest(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    at = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    share = (size - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
    return values[at - 1] + (values[at] - values[at - 1]) * share


def _on_line(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    """Return the value at ``size`` on the line that minimises the sum of squared relative errors at ``sizes``."""
    weights = [(min(values) / value) ** 2 for value in values]
    total = sum(weights)
    middle = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    height = sum(w * y for w, y in zip(weights, values, strict=True)) / total
    spread = sum(w * (x - middle) ** 2 for w, x in zip(weights, sizes, strict=True))
    slope = sum(w * (x - middle) * (y - height) for w, x, y in zip(weights, sizes, values, strict=True)) / spread
    return height + slope * (size - middle)
