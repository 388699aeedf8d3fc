"""Stage times: the earliest starts and shortest remaining times of a micro-batch on each stage of a chain.

The lower bounds of `pipesched.simulation` and of the search are computed from these times.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["StageTimes", "chain_times"]


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Durations, earliest starts and shortest remaining times of one micro-batch on one stage, in one unit of time."""

    forward: float  # duration of F
    gradient: float  # duration of the first part of the backward, for which the previous stage waits
    rest: float  # duration of the other part of the backward
    start: float  # earliest start of F
    turn: float  # earliest start of the gradient
    rest_start: float  # earliest start of the rest
    after_forward: float  # from the end of F to the end of all work that follows it
    after_gradient: float  # from the end of the gradient to the end of all work that follows it
    down: float  # from the end of the gradient to the end of the work of earlier stages that follows it
    release: float  # duration of the shortest action that releases a (stage, micro-batch) pair

    @property
    def backward(self) -> float:
        """The shortest time of a whole backward pass."""
        return self.gradient + self.rest

    @property
    def life(self) -> float:
        """The shortest time from the start of F until the (stage, micro-batch) pair is released."""
        return self.turn - self.start + self.backward


def chain_times(
    times: Sequence[Sequence[float]], there: Sequence[float], back: Sequence[float], *, split: bool = True
) -> list[StageTimes]:
    """Compute the times of each stage from one micro-batch that passes down the chain and back without waiting.

    Args:
        times: the times of F, I, W and B: for each of these kinds, one number per stage.
        there: for each stage but the last, the time of the message to the next stage.
        back: for the same stages, the time of the message back from the next stage.
        split: whether a backward can be split into an I and a W. If not, pass the time of B as that of I, and 0 for W.

    """
    forward, inputs, weights, whole = times
    count = len(forward)
    gradient = [min(i, b) for i, b in zip(inputs, whole, strict=True)]
    start: list[float] = [0]
    down: list[float] = [0]
    ends: list[float] = []  # from the start of a stage's gradient to the end of all work that follows
    for s in range(count):
        ends.append(min(inputs[s] + max(weights[s], down[s]), whole[s] + down[s]))
        if s + 1 < count:
            start.append(start[s] + forward[s] + there[s])
            down.append(back[s] + ends[s])
    turn = [start[-1] + forward[-1]]
    after = [ends[-1]]
    for s in reversed(range(count - 1)):
        turn.append(turn[-1] + gradient[s + 1] + back[s])
        after.append(there[s] + forward[s + 1] + after[-1])
    turn.reverse()
    after.reverse()
    found = []
    for s in range(count):
        apart = inputs[s] + weights[s] <= whole[s]  # whether an I followed by a W is at least as fast as a B
        found.append(
            StageTimes(
                forward=forward[s],
                gradient=gradient[s],
                rest=min(whole[s], inputs[s] + weights[s]) - gradient[s],
                start=start[s],
                turn=turn[s],
                rest_start=turn[s] + (inputs[s] if apart else 0),
                after_forward=after[s],
                after_gradient=max(weights[s], down[s]) if apart else down[s],
                down=down[s],
                release=min(whole[s], weights[s]) if split else whole[s],
            )
        )
    return found
