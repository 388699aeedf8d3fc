"""Chain costs: costs of a chain of stages whose action times include the overheads of the ranks.

The search for orders, the exact solver and the lower bound know only the times of actions and of messages.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from pipesched.program.placement import Placement
from pipesched.program.search.stage_times import StageTimes, chain_times
from pipesched.simulation.costs import Costs
from pipesched.simulation.links import Link, Links

__all__ = ["StageTimes", "chain_costs", "stage_times", "with_overheads"]


def chain_costs(costs: Costs, placement: Placement) -> Costs:
    """Adapt costs for `lower_bound` and `solve`, which support neither links nor overheads.

    The overheads, apart from crowding, are added to the times of the actions. The smallest latency of the links in use
    is added to the time of each message.
    """
    own = with_overheads(costs, placement)
    ways = {way for way in pairwise(placement) if way[0] != way[1]}
    latency_s = min((own.links.link(*way).latency_s for way in ways), default=0) if own.links else 0
    return replace(own, transfer_s=own.transfer_s + latency_s, links=None)


def with_overheads(costs: Costs, placement: Placement) -> Costs:
    """Return costs without overheads, whose action times include the overheads, apart from crowding.

    With the new costs, a program has the same simulated times as with the old costs and ``crowding=()``.

    Args:
        costs: the costs of a chain of stages.
        placement: the rank of each stage.

    """
    overheads = costs.overheads
    if overheads is None:
        return costs
    receive_s, send_s = (_at_boundaries(costs, placement, end) for end in (overheads.receive, overheads.send))
    starts_s = [overheads.action_s + overheads.waking_s * (1 - share) for share in costs.shares]
    before, after = slice(None, -1), slice(1, None)  # the boundaries at which stages begin and end
    forward_s = _sums(starts_s, receive_s[before], send_s[after])
    backward_s = _sums(starts_s, receive_s[after], send_s[before])
    times: dict[str, Any] = {
        "forward_s": _sums(costs.forward_s, forward_s),
        "input_grad_s": _sums(costs.input_grad_s, backward_s),
        "weight_grad_s": tuple(time_s + overheads.action_s for time_s in costs.weight_grad_s),
        "backward_s": _sums(costs.backward_s, backward_s),
    }
    return replace(costs, links=costs.links or Links(overheads.link), overheads=None, **times)


def _at_boundaries(costs: Costs, placement: Placement, end: Link) -> list[float]:
    """Return the time that a message takes at one end, for the begin of the first stage and the end of each stage.

    The time is 0 where no message passes between two ranks.
    """
    crossing = [one != other for one, other in pairwise(placement)]
    inner = [end.time_s(size) if crosses else 0 for size, crosses in zip(costs.output_bytes, crossing, strict=False)]
    return [0, *inner, 0]


def _sums(*times: Any) -> tuple[Any, ...]:
    return tuple(map(sum, zip(*times, strict=True)))


def stage_times(costs: Costs, placement: Placement, split: bool) -> list[StageTimes]:
    """Compute the times of each stage in seconds."""
    way = [costs.transfer_s if a != b else 0 for a, b in pairwise(placement)]
    whole = costs.backward_s
    inputs, weights = (costs.input_grad_s, costs.weight_grad_s) if split else (whole, (0,) * costs.num_stages)
    return chain_times((costs.forward_s, inputs, weights, whole), way, way, split=split)
