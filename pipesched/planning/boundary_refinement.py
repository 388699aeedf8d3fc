"""Boundary refinement: moves the boundaries of stages wherever that shortens the simulated step.

The partition with the smallest bottleneck need not have the shortest step. A move takes one layer from a stage and
gives one to another stage; all stages between the two pass one on.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from pipesched.partitioning.result import StageLayers
from pipesched.planning.pins import Pins

__all__ = ["refined"]

#: Where each stage begins, and the end of the last one.
_Boundaries = tuple[int, ...]

_GAIN = 1e-6  # of a step: a smaller one is rounding


def refined(
    stages: StageLayers,
    pins: Pins,
    seconds: Sequence[float],
    step_s: Callable[[StageLayers], float],
    *,
    goes_on: Callable[[], bool],
) -> StageLayers:
    """The stages after as many moves as shorten the step. Of all moves the first that shortens it is made; moves from
    the slowest stages to the fastest are tried first.

    pins: what every partition keeps. seconds: of each layer. step_s: of stages; called while ``goes_on``.
    """
    boundaries: _Boundaries = (*(pins.places[names[0]] for names in stages), len(pins.layers))
    best_s = step_s(stages)
    tried = {boundaries}
    while goes_on():
        for other in _moves(boundaries, seconds):
            if other in tried or not pins.allows(other):
                continue
            if not goes_on():
                return stages
            tried.add(other)
            moved = pins.stages(other[:-1])
            other_s = step_s(moved)
            if other_s < best_s * (1 - _GAIN):
                boundaries = other
                stages = moved
                best_s = other_s
                break
        else:
            return stages
    return stages


def _moves(boundaries: _Boundaries, seconds: Sequence[float]) -> Iterator[_Boundaries]:
    """The boundaries after one move: first those between the most unlike stages, of these the shortest moves."""
    loads = [sum(seconds[begin:end]) for begin, end in pairwise(boundaries)]
    moves = sorted(
        (loads[taker] - loads[giver], abs(taker - giver), giver, taker)
        for giver, (begin, end) in enumerate(pairwise(boundaries))
        for taker in range(len(loads))
        if giver != taker and end - begin > 1
    )
    for _, _, giver, taker in moves:
        low, high = sorted((giver, taker))
        way = 1 if taker < giver else -1
        yield tuple(place + way if low < stage <= high else place for stage, place in enumerate(boundaries))
