"""Label bound: a lower bound on the makespan, found by searching through all orders of one rank's actions.

The bound is found by bisection: it is the largest deadline that no program meets, as proved by
`pipesched.simulation.relaxation.label_sweep`.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pipesched.program.placement import Placement, chunks_of
from pipesched.simulation.costs import Costs
from pipesched.simulation.relaxation.chain_costs import StageTimes, stage_times
from pipesched.simulation.relaxation.label_sweep import RankTimes, Sweep
from pipesched.simulation.relaxation.time_units import TimeUnits

__all__ = ["label_bound"]

_DEADLINES = 4  # number of deadlines per sweep
_FIRST_STEP = 256  # the first deadline is low x (1 + 1 / _FIRST_STEP); each further step is twice as long
_PRECISION = 2**16  # the bisection ends when the deadlines are closer than this fraction


def label_bound(
    costs: Costs,
    placement: Placement,
    limits: Mapping[int, int],
    num_microbatches: int,
    *,
    low: float,
    effort: int,
    split: bool = True,
) -> float:
    """Return a lower bound in seconds, at least ``low``, on the makespan of every program for a chain of stages.

    Args:
        costs: the costs of each stage.
        placement: the rank of each stage.
        limits: the maximum number of (stage, micro-batch) pairs that each rank holds at once, keyed by rank.
        num_microbatches: the number of micro-batches.
        low: a known lower bound in seconds, above 0.
        effort: the maximum total number of values in the labels of all sweeps. When it is reached, the search returns
            the best bound so far.
        split: whether a backward can be an I and a W.

    """
    units = TimeUnits.of(costs, num_microbatches)
    stages = stage_times(costs, placement, split)
    by_chunks: dict[int, list[RankTimes]] = {}
    for rank, limit in limits.items():
        own = chunks_of(placement, rank)
        by_chunks.setdefault(len(own), []).append(_rank_times(own, costs, stages, units, limit))
    start = least = units.up(low)
    for ranks in by_chunks.values():
        search = _Bisection(ranks, num_microbatches, split=split)
        least, effort = search.run(least, effort)
    return max(low, units.seconds(least)) if units.exact or least > start else low


class _Bisection:
    """The search for the largest deadline that no program meets."""

    def __init__(self, ranks: Sequence[RankTimes], num_microbatches: int, *, split: bool) -> None:
        self._ranks = ranks
        self._num_microbatches = num_microbatches
        self._split = split

    def run(self, low: int, effort: int) -> tuple[int, int]:
        """Return the largest deadline, at least ``low``, that no program meets, and the remaining effort."""
        high: int | None = None
        step = max(1, low // _FIRST_STEP)
        while effort > 0 and (high is None or high - low > max(1, low // _PRECISION)):
            if high is None:
                deadlines = [low + (step << power) for power in range(_DEADLINES)]
                step <<= _DEADLINES
            else:
                parts = range(1, _DEADLINES + 1)
                deadlines = sorted({low + (high - low) * part // (_DEADLINES + 1) for part in parts} - {low})
            sweep = Sweep(self._ranks, self._num_microbatches, deadlines, split=self._split)
            found = sweep.run(effort)
            effort = found.effort
            low = max([low, *found.missed])
            high = min(found.kept, default=high)
        return low, effort


def _rank_times(
    own: Sequence[int], costs: Costs, stages: Sequence[StageTimes], units: TimeUnits, limit: int
) -> RankTimes:
    """Return the times and the memory limit of a rank with these stages, in the form that a `Sweep` takes.

    Messages from other ranks arrive one by one. The time between two messages is at least the time that the slowest
    stage on their path takes.
    """
    chunks = [stages[stage] for stage in own]
    last = chunks[-1]
    before = stages[: own[0]]
    beyond = stages[own[-1] + 1 :]
    forward_lag = [b.start - a.start - a.forward for a, b in pairwise(chunks)]
    backward_lag = [a.turn - b.turn - b.gradient for a, b in pairwise(chunks)]
    returns = [max(stage.forward, stage.gradient) for stage in beyond]
    if beyond:  # between two gradients that it returns, the last stage runs one F and one gradient
        returns.append(beyond[-1].forward + beyond[-1].gradient)
    return RankTimes(
        forward=units.each_down(stage.forward for stage in chunks),
        input_grad=units.each_down(costs.input_grad_s[stage] for stage in own),
        weight_grad=units.each_down(costs.weight_grad_s[stage] for stage in own),
        backward=units.each_down(costs.backward_s[stage] for stage in own),
        start=units.down(chunks[0].start),
        arrival_interval=units.down(max((stage.forward for stage in before), default=0)),
        forward_lag=units.each_down([*forward_lag, last.turn - last.start - last.forward]),
        return_interval=units.down(max(returns, default=0)),
        backward_lag=units.each_down([0, *backward_lag]),
        after_forward=units.each_down(stage.after_forward for stage in chunks),
        after_gradient=units.each_down(stage.down for stage in chunks),
        limit=limit,
    )
