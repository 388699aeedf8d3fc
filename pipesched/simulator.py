"""Simulator: a program and its costs -> the trace of one step, exactly."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesched.actions import Kind
from pipesched.bounds import program_bound
from pipesched.columns import CODES, Ints
from pipesched.costs import Costs
from pipesched.errors import ScheduleError
from pipesched.lowering import lower
from pipesched.program import Program
from pipesched.trace import Spans, Trace
from pipesched.validation import check_order, deadlock_error
from pipesched.walk import Timing, walk

__all__ = ["simulate"]


def simulate(program: Program, costs: Costs) -> Trace:
    """Run a program on a virtual clock that starts at 0.

    Each action starts when its rank is free and what it needs has ended; what comes from another rank comes
    ``costs.transfer_s`` and what its link takes later. A transfer occupies no rank, so a plain and a lowered program
    have equal makespan; where links are contended it occupies its link, and the program is lowered for that.
    Raises ScheduleError for an invalid program or costs of another number of stages.
    """
    if costs.num_stages != program.num_stages:
        raise ScheduleError(
            f"costs have one number a stage; the program has {program.num_stages} stages, "
            f"the costs {costs.num_stages}; make the costs for {program.num_stages} stages"
        )
    check_order(program)
    if costs.links is not None and costs.links.contended:
        program = lower(program)
    walked = walk(program, _timing(program, costs))
    if sum(walked.reached) < len(program.columns):
        raise deadlock_error(program, walked.reached)
    spans = Spans.of_program(program.orders, walked.starts, walked.ends)
    bound_s = program_bound(program, costs)
    return Trace(spans, program.num_ranks, program.name, costs, program.versions, bound_s)


def _timing(program: Program, costs: Costs) -> Timing:
    columns = program.columns
    seconds = np.zeros(len(columns), object)
    for kind in Kind:
        rows = columns.kind == CODES[kind]
        times = costs.times(kind)
        if times and rows.any():
            seconds[rows] = _exactly(times)[columns.stage[rows]]
    firsts = np.flatnonzero(columns.joined)
    seconds[firsts] = (seconds[firsts] + seconds[firsts + 1]) * costs.overlap
    lags = np.zeros(len(program.requirements.row), object)
    messages = _messages(program, costs)
    if costs.links is None:
        lags[messages.at] = costs.transfer_s
        return Timing(seconds, lags)
    ends = messages.sender, messages.receiver
    travel = costs.links.travel(*ends, messages.size)
    lags[messages.at] = costs.transfer_s + costs.links.latencies(*ends)
    if not costs.links.contended:
        lags[messages.at] += travel
        return Timing(seconds, lags)
    seconds[messages.send] = travel
    occupied = np.full(len(columns), -1, np.int64)
    occupied[messages.send] = messages.sender * program.num_ranks + messages.receiver
    return Timing(seconds, lags, occupied)


class _Messages(NamedTuple):
    """What travels between ranks: its place among the requirements, the row that gives it, its ranks and its bytes."""

    at: Ints
    send: Ints
    sender: Ints
    receiver: Ints
    size: NDArray[Any]


def _messages(program: Program, costs: Costs) -> _Messages:
    columns, rank_of = program.columns, program.orders.rank_of
    at = program.crossing
    row, needed = (part[at] for part in program.requirements)
    forward = columns.are(Kind.F, Kind.SEND_F)[needed]  # a gradient is as large as the output that it is of
    producer = np.where(forward, columns.stage[needed], columns.stage[row])
    return _Messages(at, needed, rank_of[needed], rank_of[row], _exactly(costs.output_bytes)[producer])


def _exactly(values: tuple[Any, ...]) -> NDArray[Any]:
    """An array of the numbers as they are: whole numbers and fractions stay exact."""
    array = np.empty(len(values), object)
    array[:] = values
    return array
