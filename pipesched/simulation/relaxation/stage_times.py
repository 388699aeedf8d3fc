"""Stage times: the earliest starts and shortest remaining times of a micro-batch on each stage of a chain."""

from dataclasses import dataclass
from itertools import pairwise

from pipesched.program.placement import Placement
from pipesched.simulation.costs import Costs

__all__ = ["StageTimes", "stage_times"]


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Durations, earliest starts and shortest remaining times of one micro-batch on one stage, in seconds."""

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


def stage_times(costs: Costs, placement: Placement, split: bool) -> list[StageTimes]:
    """Compute the times of each stage from one micro-batch that passes down the chain and back without waiting."""
    count = costs.num_stages
    way = [costs.transfer_s if a != b else 0 for a, b in pairwise(placement)]
    forward = costs.forward_s
    whole = costs.backward_s
    inputs, weights = (costs.input_grad_s, costs.weight_grad_s) if split else (whole, (0,) * count)
    gradient = [min(i, b) for i, b in zip(inputs, whole, strict=True)]
    start: list[float] = [0]
    down: list[float] = [0]
    ends: list[float] = []  # from the start of a stage's gradient to the end of all work that follows
    for s in range(count):
        ends.append(min(inputs[s] + max(weights[s], down[s]), whole[s] + down[s]))
        if s + 1 < count:
            start.append(start[s] + forward[s] + way[s])
            down.append(way[s] + ends[s])
    turn = [start[-1] + forward[-1]]
    after = [ends[-1]]
    for s in reversed(range(count - 1)):
        turn.append(turn[-1] + gradient[s + 1] + way[s])
        after.append(way[s] + forward[s + 1] + after[-1])
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
