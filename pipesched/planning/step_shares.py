"""Step shares: what a step's time is spent on, found by simulating the step without one cost after the other."""

from dataclasses import dataclass, replace
from itertools import pairwise

from pipesched.program.program import Program
from pipesched.simulation.costs import Costs
from pipesched.simulation.links import Link
from pipesched.simulation.simulator import simulate

__all__ = ["StepShares", "step_shares"]

_FREE = Link()


@dataclass(frozen=True, kw_only=True)
class StepShares:
    """The shares of a step, from 0 to 1. They add up to 1.

    Each share is the part of the step that is saved if one cost disappears, after the costs before it disappeared:
    collectives, messages, recomputation, and then all waiting. The rest is the work of the busiest rank, a part of
    which would disappear if all ranks had equal work.
    """

    #: The sums and gathers over replicas.
    collectives: float
    #: Messages between stages.
    messages: float
    #: Recomputed forwards, copies of activations to the host and back, and copies of states.
    recomputation: float
    #: Filling and draining the pipeline: the time in which the busiest rank waits for other stages.
    waiting: float
    #: The work of the busiest rank above the mean of all ranks.
    imbalance: float
    #: The mean work of the ranks.
    compute: float
    #: The rank with the most work.
    busiest: int


def step_shares(program: Program, costs: Costs, without_saving: tuple[Program, Costs] | None = None) -> StepShares:
    """Return the shares of a simulated step.

    Args:
        program: the program with all actions of a step.
        costs: the costs of its stages.
        without_saving: the program and the costs of the same stages with all activations held. Default: those of
            ``program`` and ``costs`` with recomputations and copies that take no time.

    """
    steps = [(program, costs), (program, _alone(costs)), (program, _quiet(_alone(costs)))]
    times = [simulate(*step).makespan_s for step in steps]
    plain_program, plain_costs = without_saving or (program, _without_saving(costs))
    trace = simulate(plain_program, _quiet(_alone(plain_costs)))
    whole_s = times[0]
    busy_s = trace.busy_s
    ends = [*times, trace.makespan_s, max(busy_s), sum(busy_s) / len(busy_s), 0.0]
    shares = [max(0.0, before - after) / whole_s if whole_s else 0.0 for before, after in pairwise(ends)]
    names = ("collectives", "messages", "recomputation", "waiting", "imbalance", "compute")
    return StepShares(**dict(zip(names, shares, strict=True)), busiest=busy_s.index(max(busy_s)))


def _alone(costs: Costs) -> Costs:
    """Return the costs without the collectives of replicas."""
    return replace(costs, reduce_s=tuple((0.0,) * len(own) for own in costs.reduce_s), unshard_s=(), gather_s=())


def _quiet(costs: Costs) -> Costs:
    """Return the costs with messages that take no time."""
    own = costs.overheads
    overheads = None if own is None else replace(own, send=_FREE, receive=_FREE, link=_FREE)
    return replace(costs, transfer_s=0, links=None, overheads=overheads)


def _without_saving(costs: Costs) -> Costs:
    """Return the costs with recomputations and host copies that take no time."""
    none = (0.0,) * costs.num_stages
    return replace(costs, recompute_s=none, offload_s=none, fetch_s=none, keep_s=none, replay_s=none)
