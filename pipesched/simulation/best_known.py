"""Best known: finds the fastest program of any schedule for given costs, placement and limits."""

from collections.abc import Iterator, Sequence
from typing import Any

from pipesched import schedules
from pipesched.errors import ScheduleError
from pipesched.program.liveness import peak_in_flight, rank_limits
from pipesched.program.placement import Placement
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs
from pipesched.simulation.simulator import step_time

__all__ = ["best_known"]


def best_known(
    costs: Costs,
    num_microbatches: int,
    placement: Placement,
    max_in_flight: int | Sequence[int] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> Program | None:
    """Return the fastest program of any schedule for this placement and these limits, or None if no schedule fits.

    Compares only exact programs (`Program.exact`) that run a chain of stages and have no updates.

    Args:
        costs: the costs of each stage.
        num_microbatches: the number of micro-batches.
        placement: the rank of each stage.
        max_in_flight: the maximum number of (stage, micro-batch) pairs that a rank may hold: one number, or one per
            rank. Default: no limit.
        names: the names of the schedules to compare. Default: all schedules.

    """
    fitting = [
        program
        for program in _programs(costs, num_microbatches, tuple(placement), max_in_flight, names)
        if max_in_flight is None or _fits(program, rank_limits(max_in_flight, program.num_ranks))
    ]
    return min(fitting, key=lambda program: step_time(program, costs), default=None)


def _programs(
    costs: Costs,
    num_microbatches: int,
    placement: Placement,
    max_in_flight: int | Sequence[int] | None,
    names: Sequence[str] | None,
) -> Iterator[Program]:
    """Yield the program of each schedule that supports this placement.

    The costs are passed to schedules that have an option ``costs``.
    """
    num_ranks = max(placement) + 1
    chunks = len(placement) // num_ranks
    for name in schedules.names() if names is None else names:
        schedule = schedules.get(name)
        given: dict[str, Any] = {"chunks_per_rank": chunks, "costs": costs, "placement": placement}
        if isinstance(max_in_flight, int):
            given["max_in_flight"] = max_in_flight
        options = {name: value for name, value in given.items() if name in schedule.options}
        try:
            program = schedule.program(num_ranks, num_microbatches, **options)
        except ScheduleError:  # the schedule does not support these arguments
            continue
        if program.placement == placement and program.is_chain and program.exact and not program.has_updates:
            yield program


def _fits(program: Program, limits: Sequence[int]) -> bool:
    return all(peak_in_flight(program.orders.rank(rank)) <= limit for rank, limit in enumerate(limits))
