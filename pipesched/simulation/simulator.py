"""Simulator: computes the exact trace of a step from a program and its costs."""

from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipesched.errors import ScheduleError
from pipesched.program.action_arrays import CODES, Ints
from pipesched.program.actions import BACKWARD_MESSAGES, NUMBERED, Kind, Queue
from pipesched.program.dependencies import BACKWARDS
from pipesched.program.lowering import lower
from pipesched.program.program import Program, check_program
from pipesched.program.reductions import early_stages, last_gradients, reduction_rows
from pipesched.program.traversal import Timing, Walked, walk
from pipesched.program.validation import check_order, deadlock_error
from pipesched.simulation.bounds import program_bound
from pipesched.simulation.costs import BY_BUCKET, Costs, check_costs
from pipesched.simulation.links import Link, Links
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.trace import Spans, Trace
from pipesched.units import counted

__all__ = ["message_times", "simulate", "simulate_with_bound", "step_time"]

#: The kinds that occupy each of a rank's own links. Every queue has such a link, except that of messages.
_OWN_LINKS = tuple(
    tuple(kind for kind in Kind if kind.row.queue is queue) for queue in Queue if queue is not Queue.MESSAGES
)

_ROUNDS = 12  # maximum number of repetitions of a simulation in which ranks slow each other down
_BOUND_EFFORT = 1_000_000  # about 0.1 s
_SETTLED = 1e-4  # relative change of the makespan at which the iteration ends


def simulate(program: Program, costs: Costs) -> Trace:
    """Simulate a step of a program on a virtual clock that starts at 0.

    An action starts when its rank is free and its inputs have arrived. A message between ranks takes
    ``costs.transfer_s`` plus the time of its link, and occupies no rank. A program therefore has the same makespan with
    and without explicit transfers. If links are contended, a message also occupies its link. Collectives occupy no
    rank either, but a rank runs its collectives one after the other. MIRROR, KEEP and REPLAY run likewise, in a lane of
    their own; a MIRROR lasts as long as its message, which delays no other message. With ``costs.overheads``, an action
    also takes time to start, and to receive and send messages, and is slower while other ranks of its host compute.

    ::

        trace = pipesched.simulate(pipesched.schedules.get("1f1b").program(4, 8), pipesched.Costs.uniform(4))
        print(trace.makespan_s, trace.bubble_ratio)

    Args:
        program: the program, with or without explicit transfers.
        costs: the costs of each stage.

    Returns:
        The trace of the step.

    Raises:
        ScheduleError: for an invalid program, or if program and costs have different numbers of stages or buckets.

    """
    check_program(program)
    check_costs(costs)
    if costs.num_stages != program.num_stages:
        raise ScheduleError(
            f"costs must have one number per stage; the program has {counted(program.num_stages, 'stage')}, but the "
            f"costs have {costs.num_stages}; pass costs for {counted(program.num_stages, 'stage')}"
        )
    check_order(program)
    if costs.links is not None and costs.links.contended:
        program = lower(program)
    walked = _walked(program, costs)
    spans = Spans.of_program(program.orders, walked.starts, walked.ends)
    bound_s = program_bound(program, costs)
    return Trace(spans, program.num_ranks, name=program.name, costs=costs, versions=program.versions, bound_s=bound_s)


def simulate_with_bound(program: Program, costs: Costs) -> Trace:
    """Simulate a step as ``simulate`` does, but compute a tighter lower bound ``bound_s``, which takes longer."""
    trace = simulate(program, costs)
    if not trace.above_bound:
        return trace
    return replace(trace, bound_s=program_bound(program, costs, effort=_BOUND_EFFORT))


def step_time(program: Program, costs: Costs) -> float:
    """Return the makespan of a validated program in seconds. Searches use it because it is faster than ``simulate``."""
    if costs.links is not None and costs.links.contended:
        program = lower(program)
    return max(_walked(program, costs).ends, default=0)  # the clock starts at 0


def message_times(program: Program, costs: Costs) -> tuple[list[int], list[float]]:
    """Return the bytes that each rank sends to other ranks, and the total time in seconds of each rank's messages.

    The gradients that MIRRORs send are included.
    """
    links = costs.links or Links(costs.overheads.link if costs.overheads else Link())
    messages = _messages(program, costs)
    mirrored = program.columns.stage[program.columns.are(Kind.MIRROR)]
    giver = np.concatenate([messages.sender, np.asarray(program.placement)[mirrored]])
    taker = np.concatenate([messages.receiver, np.asarray(program.copy_ranks)[mirrored]])
    sizes = np.concatenate([messages.size, _exactly(costs.gradient_bytes)[mirrored]])
    took = links.latencies(giver, taker) + links.travel(giver, taker, sizes) + costs.transfer_s
    sent: list[int] = [0] * program.num_ranks
    seconds: list[float] = [0] * program.num_ranks
    for rank, size, time_s in zip(giver.tolist(), sizes.tolist(), took.tolist(), strict=True):
        sent[rank] += size
        seconds[rank] += time_s
    return sent, seconds


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
    for kind in filter(program.index.has, Kind):
        times = costs.times(kind)
        if times:
            rows = columns.kind == CODES[kind]
            seconds[rows] = _exactly(times)[columns.stage[rows]]
    if any(program.buckets):
        _add_reductions(program, costs, seconds)
    messages = _messages(program, costs)
    if costs.overheads is not None:
        seconds += _overheads(program, costs, costs.overheads, messages)
    firsts = np.flatnonzero(columns.joined)
    seconds[firsts] = (seconds[firsts] + seconds[firsts + 1]) * costs.overlap
    lags = np.zeros(len(program.requirements.row), object)
    links = costs.links
    if links is None and costs.overheads is not None:
        links = Links(costs.overheads.link)
    _add_mirrors(program, costs, links, seconds)
    occupied = _own_links(program)
    leads = _leads(program, seconds)
    lags[program.crossing] = costs.transfer_s  # norms are too small for a link's bandwidth to matter
    if links is not None:
        lags[program.crossing] += links.latencies(
            *(program.orders.rank_of[part[program.crossing]] for part in reversed(program.requirements))
        )
    _set_commits(program, costs, links, lags)
    if links is None:
        return Timing(seconds, lags, occupied, leads)
    ends = messages.sender, messages.receiver
    travel = links.travel(*ends, messages.size)
    if not links.contended:
        lags[messages.at] += travel
        return Timing(seconds, lags, occupied, leads)
    seconds[messages.send] = travel
    occupied = np.full(len(columns), -1, np.int64) if occupied is None else occupied
    occupied[messages.send] = messages.sender * program.num_ranks + messages.receiver
    return Timing(seconds, lags, occupied, leads)


def _add_reductions(program: Program, costs: Costs, seconds: NDArray[Any]) -> None:
    """Set the times of reductions in ``seconds``. Raises ScheduleError if costs and program have different buckets."""
    for stage, (times, count) in enumerate(zip(costs.reduce_s, program.buckets, strict=True)):
        if times and count and len(times) != count:
            raise ScheduleError(
                f"costs must have a time for each bucket of a stage; stage {stage} has {count} REDUCEs, but "
                f"{len(times)} times in reduce_s; make the numbers agree"
            )
    for row in np.flatnonzero(program.columns.are(*BY_BUCKET)).tolist():
        seconds[row] = costs.seconds(program.columns.action(row))


def _add_mirrors(program: Program, costs: Costs, links: Links | None, seconds: NDArray[Any]) -> None:
    """Add the times of MIRRORs' messages to ``seconds``."""
    if not program.index.has(Kind.MIRROR):
        return
    rows = np.flatnonzero(program.columns.are(Kind.MIRROR))
    seconds[rows] += costs.transfer_s
    if links is not None:
        stage = program.columns.stage[rows]
        ends = program.orders.rank_of[rows], np.asarray(program.copy_ranks)[stage]
        seconds[rows] += links.latencies(*ends) + links.travel(*ends, _exactly(costs.gradient_bytes)[stage])


def _set_commits(program: Program, costs: Costs, links: Links | None, lags: NDArray[Any]) -> None:
    """Set the times in ``lags`` from the end of a MIRROR until a REPLAY or a KEEP may start.

    A MIRROR ends when the rank of its stage's copy has the gradients. This rank can start the REPLAY at once. It tells
    all other ranks, which can start their KEEPs when they know that all gradients have arrived.
    """
    if not program.index.has(Kind.MIRROR):
        return
    row, needed = program.requirements
    at = np.flatnonzero(program.columns.are(Kind.MIRROR)[needed] & (needed >= 0))
    ends = np.asarray(program.copy_ranks)[program.columns.stage[needed[at]]], program.orders.rank_of[row[at]]
    told = np.full(len(at), costs.transfer_s, object)
    if links is not None:
        told += links.latencies(*ends)
    lags[at] = np.where(ends[0] == ends[1], 0, told)


def _leads(program: Program, seconds: NDArray[Any]) -> dict[int, Any]:
    """Return, keyed by row, how many seconds each reduction can start before its stage's last backward ends.

    A backward is assumed to complete its buckets at equal intervals, the last one when the backward ends.
    """
    early = early_stages(program)
    leads: dict[int, Any] = {}
    for stage in early:
        count = program.buckets[stage]
        rows = reduction_rows(program, stage).tolist()
        backward = seconds[last_gradients(program)[stage]]
        leads |= {row: backward * (count - 1 - bucket) / count for bucket, row in enumerate(rows)}
    return leads


def _own_links(program: Program) -> Ints | None:
    """Return, for each action, the number of the link that it occupies, or -1; None if no action occupies a link.

    Each rank has a link for each queue: two to the host, one per direction, one for its collectives, and one for
    redundancy.
    """
    if not program.index.has(*chain.from_iterable(_OWN_LINKS)):
        return None
    occupied = np.full(len(program.columns), -1, np.int64)
    for number, kinds in enumerate(_OWN_LINKS):
        rows = program.columns.are(*kinds)
        ranks = program.orders.rank_of[rows]
        # The numbers of these links follow those of the links between ranks.
        occupied[rows] = (program.num_ranks + number) * program.num_ranks + ranks
    return occupied


def _overheads(program: Program, costs: Costs, overheads: Overheads, messages: "_SimulatedMessages") -> NDArray[Any]:
    """Return the overhead of each compute action in seconds, including receiving its inputs and sending its outputs."""
    columns = program.columns
    backward = columns.are(*BACKWARDS, *BACKWARD_MESSAGES)
    # A number for each combination of stage, micro-batch and direction.
    microbatch = np.where(columns.are(*NUMBERED), 0, columns.microbatch)
    value = (columns.stage * program.num_microbatches + microbatch) * 2 + backward
    spent = np.zeros(2 * program.num_stages * program.num_microbatches)
    for end, rows in ((overheads.receive, program.requirements.row[messages.at]), (overheads.send, messages.send)):
        np.add.at(spent, value[rows], end.latency_s + messages.size.astype(float) * end.byte_s)
    waking = overheads.waking_s * (1 - np.array(costs.shares, float))[columns.stage]
    spent_s = columns.are(Kind.F, Kind.B, Kind.I) * (spent[value] + waking)  # W has no messages
    return np.where(columns.compute, spent_s + overheads.action_s, 0).astype(object)


def _crowded(program: Program, costs: Costs, timing: Timing, walked: Walked) -> Walked:
    """Simulate again, with the slowdown of ranks that compute on one host at the same time.

    The slowdown depends on the times of the actions, which depend on the slowdown. The simulation is therefore repeated
    until the makespan is stable. Each repetition uses the mean of the old and the new slowdown, because with the new
    slowdown alone, the makespan often alternates between two values.
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
    factor = np.ones(len(columns))
    for number in range(_ROUNDS):
        starts, ends = (np.array(times, float) for times in (walked.starts, walked.ends))
        last = took
        took = float(ends.max(initial=0))
        if abs(took - last) <= _SETTLED * took:
            break
        # The first action of an overlapping pair has the time of both actions. Transfers occupy no rank.
        new = costs.overheads.crowded(starts, np.where(alone > 0, ends, starts), share, host)
        factor = (factor + new) / 2 if number else new
        seconds = np.where(alone > 0, alone * factor, timing.seconds)
        walked = walk(program, timing._replace(seconds=seconds, leads=_leads(program, seconds)))
    return walked


class _SimulatedMessages(NamedTuple):
    """The messages between ranks."""

    #: Index of the message in the program's requirements.
    at: Ints
    #: Row of the action that produces the message.
    send: Ints
    #: Sending rank.
    sender: Ints
    #: Receiving rank.
    receiver: Ints
    #: Size in bytes.
    size: NDArray[Any]


def _messages(program: Program, costs: Costs) -> _SimulatedMessages:
    columns = program.columns
    rank_of = program.orders.rank_of
    at = program.messages
    row, needed = (part[at] for part in program.requirements)
    forward = columns.are(Kind.F, Kind.SEND_F)[needed]  # a gradient has the size of its output
    producer = np.where(forward, columns.stage[needed], columns.stage[row])
    return _SimulatedMessages(
        at=at,
        send=needed,
        sender=rank_of[needed],
        receiver=rank_of[row],
        size=_exactly(costs.output_bytes)[producer],
    )


def _exactly(values: tuple[Any, ...]) -> NDArray[Any]:
    """Return the numbers as an object array, which keeps whole numbers and fractions exact."""
    array = np.empty(len(values), object)
    array[:] = values
    return array
