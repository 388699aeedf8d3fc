"""Boundary refinement: moves stage boundaries while this shortens the simulated step.

The partition with the smallest bottleneck does not always give the shortest step. A move shifts all boundaries between
two stages by one layer, so that one of the two stages loses a layer and the other stage gains a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from pipesched.partitioning.result import StageLayers
from pipesched.planning.pins import Pins

__all__ = ["refined"]

#: The index of each stage's first layer. The last entry is the number of layers.
_Boundaries = tuple[int, ...]

_GAIN = 1e-6  # gains below this fraction of a step are treated as rounding errors


def refined(
    stages: StageLayers,
    pins: Pins,
    seconds: Sequence[float],
    step_s: Callable[[StageLayers], float],
    *,
    goes_on: Callable[[], bool],
) -> StageLayers:
    """Move boundaries until no move shortens the step, and return the resulting stages.

    Moves from slow stages to fast stages are tried first. The first move that shortens the step is made, and the search
    starts over.

    Args:
        stages: the stages to start from.
        pins: constraints that every partition must meet.
        seconds: the time of each layer.
        step_s: a function that returns the step time of stages in seconds.
        goes_on: a function that returns False if the search must stop.

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
    """Yield the boundaries after each possible move.

    Moves between the stages whose times differ the most come first; on ties, moves between the closest stages.
    """
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
