"""Cut refinement: a cut with the smallest bottleneck need not have the shortest step: it is moved where that is
shorter.

A move takes one layer from a stage, and passes one on through all stages in between, to another stage.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from pipesched.planning.stage_cutter import Pins

__all__ = ["refined"]

#: The layers of each stage.
Stages = tuple[tuple[str, ...], ...]
#: Where each stage begins, and the end of the last one.
_Cut = tuple[int, ...]

_GAIN = 1e-6  # of a step: a smaller one is rounding


def refined(
    stages: Stages,
    pins: Pins,
    seconds: Sequence[float],
    step_s: Callable[[Stages], float],
    *,
    goes_on: Callable[[], bool],
) -> Stages:
    """The stages after as many moves as shorten the step, each the first that does; those from the slowest stages to
    the fastest are tried first.

    pins: what every cut keeps. seconds: of each layer. step_s: of stages; called while ``goes_on``.
    """
    cut: _Cut = (*(pins.places[names[0]] for names in stages), len(pins.layers))
    best_s = step_s(stages)
    tried = {cut}
    while goes_on():
        for other in _moves(cut, seconds):
            if other in tried or not pins.allows(other):
                continue
            if not goes_on():
                return stages
            tried.add(other)
            moved = pins.stages(other[:-1])
            other_s = step_s(moved)
            if other_s < best_s * (1 - _GAIN):
                cut, stages, best_s = other, moved, other_s
                break
        else:
            return stages
    return stages


def _moves(cut: _Cut, seconds: Sequence[float]) -> Iterator[_Cut]:
    """The cuts after one move, that between the most unlike stages first, then the shortest."""
    loads = [sum(seconds[begin:end]) for begin, end in pairwise(cut)]
    moves = sorted(
        (loads[taker] - loads[giver], abs(taker - giver), giver, taker)
        for giver, (begin, end) in enumerate(pairwise(cut))
        for taker in range(len(loads))
        if giver != taker and end - begin > 1
    )
    for _, _, giver, taker in moves:
        low, high = sorted((giver, taker))
        way = 1 if taker < giver else -1
        yield tuple(place + way if low < stage <= high else place for stage, place in enumerate(cut))
