"""Stage times: computes the times of each stage from costs and a placement."""

from itertools import pairwise

from pipesched.program.placement import Placement
from pipesched.program.search.stage_times import StageTimes, chain_times
from pipesched.simulation.costs import Costs

__all__ = ["StageTimes", "stage_times"]


def stage_times(costs: Costs, placement: Placement, split: bool) -> list[StageTimes]:
    """Compute the times of each stage in seconds."""
    way = [costs.transfer_s if a != b else 0 for a, b in pairwise(placement)]
    whole = costs.backward_s
    inputs, weights = (costs.input_grad_s, costs.weight_grad_s) if split else (whole, (0,) * costs.num_stages)
    return chain_times((costs.forward_s, inputs, weights, whole), way, way, split=split)
