"""Time units: converts times to integer multiples of a unit, for exact searches and for bounds."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, lcm, log2
from numbers import Rational

from pipesched.simulation.costs import Costs

__all__ = ["TimeUnits"]

_SLACK = Fraction(1, 1024)  # in units
_MOST = 2**38  # far below 2**63, so that sums do not overflow


@dataclass(frozen=True)
class TimeUnits:
    """A unit of time. Durations are converted to whole numbers of units, exactly or rounded down."""

    per_second: Fraction
    #: Whether every time is a whole number of units.
    exact: bool
    #: Whether every time is a whole number of seconds.
    whole: bool

    @classmethod
    def of(cls, costs: Costs, num_microbatches: int, most: int = _MOST) -> "TimeUnits":
        """Choose a unit so small that rounding matters little, but so large that a step has fewer than ``most`` units.

        If all times are whole numbers or Fractions, a unit that divides all of them is used, provided that it is large
        enough. The result is then ``exact``.
        """
        columns = (costs.forward_s, costs.input_grad_s, costs.weight_grad_s, costs.backward_s)
        times = [*(seconds for column in columns for seconds in column), costs.transfer_s]
        longest = num_microbatches * (sum(times) + 2 * costs.num_stages * costs.transfer_s)
        if all(isinstance(seconds, Rational) for seconds in times):
            per_second = lcm(*(Fraction(seconds).denominator for seconds in times))
            if longest * per_second < most:
                return cls(Fraction(per_second), exact=True, whole=all(isinstance(seconds, int) for seconds in times))
        power = floor(log2(most) - log2(longest))
        return cls(Fraction(2) ** power, exact=False, whole=False)

    def down(self, seconds: float) -> int:
        """Convert a time to units, rounded down. If not ``exact``, subtract the possible error of float sums first."""
        slack = 0 if self.exact else _SLACK
        return max(0, floor(Fraction(seconds) * self.per_second - slack))

    def each_down(self, seconds: Iterable[float]) -> tuple[int, ...]:
        """Convert times to units, as ``down`` does."""
        return tuple(map(self.down, seconds))

    def up(self, seconds: float) -> int:
        """Convert a lower bound to units: rounded up if makespans are whole numbers of units, else rounded down."""
        own = Fraction(seconds) * self.per_second
        return ceil(own) if self.exact else floor(own)

    def seconds(self, count: int) -> float:
        """Convert a number of units to seconds."""
        own = Fraction(count) / self.per_second
        if self.whole:
            return int(own)
        return own if self.exact else float(own)  # type: ignore[return-value]  # mypy rejects a Fraction as a float
