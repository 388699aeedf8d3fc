"""Simulator: a program and its costs -> the trace of one step, exactly."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import CODES, Ints
from pipesched.program.actions import Kind
from pipesched.program.lowering import lower
from pipesched.program.program import Program, check_program
from pipesched.program.traversal import Timing, Walked, walk
from pipesched.program.validation import check_order, deadlock_error
from pipesched.simulation.bounds import program_bound
from pipesched.simulation.costs import Costs, check_costs
from pipesched.simulation.links import Links
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.trace import Spans, Trace

__all__ = ["simulate", "step_time"]

_ROUNDS = 20  # at most, of a simulation in which ranks hinder each other
_SETTLED = 1e-4  # the relative change of its end with which it is over


def simulate(program: Program, costs: Costs) -> Trace:
    """Run a program on a virtual clock that starts at 0.

    Each action starts when its rank is free and what it needs has ended; what comes from another rank comes
    ``costs.transfer_s`` and what its link takes later. A transfer occupies no rank, so a plain and a lowered program
    have equal makespan; where links are contended it occupies its link, and the program is lowered for that.
    ``costs.overheads`` make actions longer: by what their rank does for them and their messages, and where ranks of one
    host compute at once.
    Raises ScheduleError for an invalid program or costs of another number of stages.
    """
    check_program(program)
    check_costs(costs)
    if costs.num_stages != program.num_stages:
        raise ScheduleError(
            f"costs have one number a stage; the program has {program.num_stages} stages, "
            f"the costs {costs.num_stages}; make the costs for {program.num_stages} stages"
        )
    check_order(program)
    if costs.links is not None and costs.links.contended:
        program = lower(program)
    walked = _walked(program, costs)
    spans = Spans.of_program(program.orders, walked.starts, walked.ends)
    bound_s = program_bound(program, costs)
    return Trace(spans, program.num_ranks, name=program.name, costs=costs, versions=program.versions, bound_s=bound_s)


def step_time(program: Program, costs: Costs) -> float:
    """The makespan alone, of a program that has been proved: for those who simulate it again and again."""
    if costs.links is not None and costs.links.contended:
        program = lower(program)
    return max(_walked(program, costs).ends, default=0)  # the clock starts at 0


def _walked(program: Program, costs: Costs) -> Walked:
    timing = _timing(program, costs)
    walked = walk(program, timing)
    if sum(walked.reached) < len(program.columns):
        raise deadlock_error(program, walked.reached)
    if costs.overheads is not None and len(costs.overheads.crowding) > 0:
        walked = _crowded(program, costs, timing, walked)
    return walked


def _timing(program: Program, costs: Costs) -> Timing:
    columns = program.columns
    seconds = np.zeros(len(columns), object)
    for kind in Kind:
        rows = columns.kind == CODES[kind]
        times = costs.times(kind)
        if times and rows.any():
            seconds[rows] = _exactly(times)[columns.stage[rows]]
    messages = _messages(program, costs)
    if costs.overheads is not None:
        seconds += _overheads(program, costs, costs.overheads, messages)
    firsts = np.flatnonzero(columns.joined)
    seconds[firsts] = (seconds[firsts] + seconds[firsts + 1]) * costs.overlap
    lags = np.zeros(len(program.requirements.row), object)
    links = costs.links
    if links is None and costs.overheads is not None:
        links = Links(costs.overheads.link)
    occupied = _to_hosts(program)
    if links is None:
        lags[messages.at] = costs.transfer_s
        return Timing(seconds, lags, occupied)
    ends = messages.sender, messages.receiver
    travel = links.travel(*ends, messages.size)
    lags[messages.at] = costs.transfer_s + links.latencies(*ends)
    if not links.contended:
        lags[messages.at] += travel
        return Timing(seconds, lags, occupied)
    seconds[messages.send] = travel
    occupied = np.full(len(columns), -1, np.int64) if occupied is None else occupied
    occupied[messages.send] = messages.sender * program.num_ranks + messages.receiver
    return Timing(seconds, lags, occupied)


def _to_hosts(program: Program) -> Ints | None:
    """The link that each copy to or from the host occupies: each rank has one in each direction. None for no copies."""
    if not program.index.has(Kind.OFFLOAD, Kind.FETCH):
        return None
    occupied = np.full(len(program.columns), -1, np.int64)
    for direction, kind in enumerate((Kind.OFFLOAD, Kind.FETCH)):
        rows = program.columns.are(kind)
        ranks = program.orders.rank_of[rows]
        occupied[rows] = (program.num_ranks + direction) * program.num_ranks + ranks  # behind those of pairs
    return occupied


def _overheads(program: Program, costs: Costs, overheads: Overheads, messages: "_Messages") -> NDArray[Any]:
    """What each compute action takes beside its stage's work, with what it receives before and sends behind it."""
    columns = program.columns
    backward = columns.are(Kind.B, Kind.I, Kind.SEND_B, Kind.RECV_B)
    value = (columns.stage * program.num_microbatches + columns.microbatch) * 2 + backward  # and its two ends
    spent = np.zeros(2 * program.num_stages * program.num_microbatches)
    for end, rows in ((overheads.receive, program.requirements.row[messages.at]), (overheads.send, messages.send)):
        np.add.at(spent, value[rows], end.latency_s + messages.size.astype(float) * end.byte_s)
    waking = overheads.waking_s * (1 - np.array(costs.shares, float))[columns.stage]
    own = columns.are(Kind.F, Kind.B, Kind.I) * (spent[value] + waking) + overheads.action_s  # W waits for no message
    return np.where(columns.compute, own, 0).astype(object)


def _crowded(program: Program, costs: Costs, timing: Timing, walked: Walked) -> Walked:
    """The same where ranks that compute at once hinder each other: how much depends on when they do.

    When they do depends on how much they are hindered: repeated until the end does not move.
    """
    if costs.overheads is None or costs.overheads.slower(np.array([float(program.num_ranks)]))[0] == 1:
        return walked
    columns = program.columns
    rank_of = program.orders.rank_of
    hosts = np.array(costs.links.hosts if costs.links and costs.links.hosts else (0,) * program.num_ranks)
    alone = np.where(columns.compute & ~columns.overlapping, timing.seconds, 0).astype(float)
    share = np.array(costs.shares, float)[columns.stage]
    host = hosts[rank_of]
    took = 0.0
    for _ in range(_ROUNDS):
        starts, ends = (np.array(times, float) for times in (walked.starts, walked.ends))
        last = took
        took = float(ends.max(initial=0))
        if abs(took - last) <= _SETTLED * took:
            break
        # An overlapping pair has its time in its first action; transfers take no time of a rank.
        factor = costs.overheads.crowded(starts, np.where(alone > 0, ends, starts), share, host)
        seconds = np.where(alone > 0, alone * factor, timing.seconds)
        walked = walk(program, timing._replace(seconds=seconds))
    return walked


class _Messages(NamedTuple):
    """What travels between ranks."""

    #: Its place among the requirements.
    at: Ints
    #: The row that gives it.
    send: Ints
    #: The rank that sends it.
    sender: Ints
    #: The rank that receives it.
    receiver: Ints
    #: In bytes.
    size: NDArray[Any]


def _messages(program: Program, costs: Costs) -> _Messages:
    columns = program.columns
    rank_of = program.orders.rank_of
    at = program.crossing
    row, needed = (part[at] for part in program.requirements)
    forward = columns.are(Kind.F, Kind.SEND_F)[needed]  # a gradient is as large as the output that it is of
    producer = np.where(forward, columns.stage[needed], columns.stage[row])
    return _Messages(
        at=at,
        send=needed,
        sender=rank_of[needed],
        receiver=rank_of[row],
        size=_exactly(costs.output_bytes)[producer],
    )


def _exactly(values: tuple[Any, ...]) -> NDArray[Any]:
    """An array of the numbers as they are: whole numbers and fractions stay exact."""
    array = np.empty(len(values), object)
    array[:] = values
    return array
