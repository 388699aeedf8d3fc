"""Simulator: a program and its costs -> the trace of one step, exactly."""

from pipesched.actions import Action, Kind, Lane
from pipesched.costs import Costs
from pipesched.dependencies import progress
from pipesched.errors import ScheduleError
from pipesched.program import Program
from pipesched.trace import Span, Trace
from pipesched.validation import validate

__all__ = ["simulate"]

_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def simulate(program: Program, costs: Costs) -> Trace:
    """Run a program on a virtual clock that starts at 0.

    Each action starts when its rank is free and what it needs has ended; what comes from another rank comes
    ``costs.transfer_s`` later. A transfer occupies no rank, so a plain and a lowered program have equal makespan.
    Raises ScheduleError for an invalid program or costs of another number of stages.
    """
    if costs.num_stages != program.num_stages:
        raise ScheduleError(
            f"costs have one number a stage; the program has {program.num_stages} stages, "
            f"the costs {costs.num_stages}; make the costs for {program.num_stages} stages"
        )
    validate(program)
    free: list[float] = [0] * program.num_ranks
    ends: dict[Action, float] = {}
    spans: list[Span] = []
    for rank, _, action in progress(program.orders, program.needs):
        arrivals = (ends[need] + _latency(program, costs, need, action) for need in program.needs(action))
        ready = max(arrivals, default=0)
        start = max(free[rank], ready) if action.kind not in _RECEIVES else free[rank]
        end = max(start, ready) + costs.seconds(action)
        spans.append(Span(action, rank, start, end, action.lane))
        ends[action] = end
        if action.lane is Lane.COMPUTE:
            free[rank] = end
    return Trace(tuple(spans), program.num_ranks, program.name, costs)


def _latency(program: Program, costs: Costs, need: Action, action: Action) -> float:
    """Time on the way between two actions: of a transfer, or of the edge that it stands for."""
    between_ranks = program.placement[need.stage] != program.placement[action.stage]
    return costs.transfer_s if between_ranks else 0
