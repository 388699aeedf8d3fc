"""Partial orders: adds actions to the beginnings of all ranks' orders, bounds their makespan, and compares them.

Actions are added in order of start. After an action is added, no rank is free before the start
of this action, because no later action can start earlier.
"""

from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.list_orders import OrderProgress, account, fits, roomy
from pipesched.program.search.problem import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, OrderProblem, Tables
from pipesched.program.search.stage_times import chain_times

__all__ = ["Ends", "append", "choices", "dominates", "ends_of", "least", "load", "size_of", "store"]

_NEVER = 1 << 53  # later than every start


class Ends(NamedTuple):
    """The work that follows each end of an F, I or B. The ends are numbered as in ``Tables.yields``."""

    #: The shortest time from the end of an F, or from the start of an I or a B, to the end of its micro-batch.
    rest: Whole
    #: The rank of the action that waits for this end; if no action waits, the rank of the F, I or B itself.
    rank: Whole
    #: The time of the message to that action.
    lag: Whole


def ends_of(problem: OrderProblem) -> Ends:
    """Compute the Ends of a problem."""
    count, stages = problem.num_microbatches, problem.num_stages
    pairs = stages * count
    rest = [0] * (2 * pairs)
    for microbatch in range(count):
        times = [[row[microbatch] for row in rows] for rows in problem.times]
        lags = [[row[microbatch] for row in rows] for rows in (problem.forward_lags, problem.backward_lags)]
        for stage, own in enumerate(chain_times(times, *lags)):
            _, inputs, weights, whole_backward = (row[stage] for row in times)
            pair = stage * count + microbatch
            rest[pair] = int(own.after_forward)
            rest[pairs + pair] = int(min(inputs + max(weights, own.down), whole_backward + own.down))
    place = problem.placement
    after = [min(stage + 1, stages - 1) for stage in range(stages)]
    before = [max(stage - 1, 0) for stage in range(stages)]
    none = [0] * count
    waits = [*problem.forward_lags, none, none, *problem.backward_lags]
    ranks = [place[stage] for stage in (*after, *before) for _ in range(count)]
    return Ends(whole(rest), whole(ranks), whole(lag for row in waits for lag in row))


def size_of(progress: OrderProgress) -> int:
    """Return the number of integers that describe the partial orders of all ranks."""
    counts = len(progress.forwards) + len(progress.gradients) + len(progress.weights)
    times = len(progress.times.free_at) + len(progress.times.done) + len(progress.left)
    return counts + times + len(progress.held) + len(progress.owed)


@compiled
def load(progress: OrderProgress, states: Whole, at: int) -> None:
    """Set ``progress`` to the partial orders stored in ``states``, starting at index ``at``."""
    times = progress.times
    counts = (progress.forwards, progress.gradients, progress.weights)
    for row in (*counts, times.free_at, times.done, progress.left, progress.held, progress.owed):
        for number in range(len(row)):
            row[number] = states[at + number]
        at += len(row)


@compiled
def store(progress: OrderProgress, states: Whole, at: int) -> None:
    """Write the partial orders to ``states``, starting at index ``at``."""
    times = progress.times
    counts = (progress.forwards, progress.gradients, progress.weights)
    for row in (*counts, times.free_at, times.done, progress.left, progress.held, progress.owed):
        for number in range(len(row)):
            states[at + number] = row[number]
        at += len(row)


@compiled
def choices(tables: Tables, progress: OrderProgress, codes: Whole) -> int:
    """Find all actions that can come next. Write them to ``codes``, and return their number."""
    count = tables.num_microbatches
    done = progress.times.done
    number = 0
    for stage in range(tables.num_stages):
        rank = tables.rank_of[stage]
        forward = progress.forwards[stage]
        gradient = progress.gradients[stage]
        weight = progress.weights[stage]
        if forward < count:
            code = (stage * count + forward) * KINDS + FORWARD
            if done[tables.needs[code]] >= 0 and _has_room(tables, progress, rank, stage, code):
                codes[number] = code
                number += 1
        if gradient < forward:
            code = (stage * count + gradient) * KINDS + INPUT_GRAD
            known = done[tables.needs[code]] >= 0
            if known and fits(tables, progress, rank, code):
                codes[number] = code
                number += 1
            code += BACKWARD - INPUT_GRAD
            if known and tables.fuses and weight == gradient and fits(tables, progress, rank, code):
                codes[number] = code
                number += 1
        if weight < gradient:
            codes[number] = (stage * count + weight) * KINDS + WEIGHT_GRAD
            number += 1
    return number


@compiled
def _has_room(tables: Tables, progress: OrderProgress, rank: int, stage: int, code: int) -> bool:
    """Return whether a rank has room for the next F of a stage, and can then still finish all micro-batches.

    If it cannot finish them oldest first, it cannot finish them in any other order, because every stage runs its
    micro-batches in ascending order. This assumes that a B takes no memory.
    """
    room = fits(tables, progress, rank, code)
    for resource in range(tables.num_resources):
        room = room and roomy(tables, progress, rank, resource, stage)
    return room


@compiled
def append(tables: Tables, progress: OrderProgress, code: int) -> None:
    """Append an action to the order of its rank. It starts as early as possible, but not before the previous action."""
    free_at = progress.times.free_at
    done = progress.times.done
    stage = code // KINDS // tables.num_microbatches
    rank = tables.rank_of[stage]
    start = max(free_at[rank], done[tables.needs[code]] + tables.lag[code])
    for other in range(tables.num_ranks):
        free_at[other] = max(free_at[other], start)
    free_at[rank] = start + tables.seconds[code]
    done[tables.needs[code]] = 0  # no other action waits for this end
    done[tables.yields[code]] = free_at[rank]
    kind = code % KINDS
    if kind == FORWARD:
        progress.forwards[stage] += 1
    if kind in (INPUT_GRAD, BACKWARD):
        progress.gradients[stage] += 1
    if kind in (WEIGHT_GRAD, BACKWARD):
        progress.weights[stage] += 1
    account(tables, progress, rank, code)


@compiled
def least(tables: Tables, progress: OrderProgress, ends: Ends) -> tuple[int, int]:
    """Return a lower bound on the makespan of all continuations, and the sum of the ranks' bounds.

    The bound assumes that each stage runs its micro-batches in ascending order, but that a rank can run actions of
    different stages at the same time. A rank's bound is the earliest start of its next action, plus the time of all its
    remaining actions.

    The ends of the remaining actions are written to ``progress``.
    """
    bound = _run_forwards(tables, progress, ends)
    bound = max(bound, _run_gradients(tables, progress, ends))
    total = 0
    for rank in range(tables.num_ranks):
        begin = progress.start[rank] if progress.left[rank] > 0 else progress.times.free_at[rank]
        own = begin + progress.left[rank]
        bound = max(bound, own)
        total += own
    return bound, total


@compiled
def _run_forwards(tables: Tables, progress: OrderProgress, ends: Ends) -> int:
    """Write the ends of the remaining forwards, and the start of each rank's next F or W. Return a lower bound."""
    count = tables.num_microbatches
    free_at = progress.times.free_at
    done = progress.times.done
    bound = 0
    for rank in range(tables.num_ranks):
        progress.start[rank] = _NEVER
    for stage in range(tables.num_stages):
        rank = tables.rank_of[stage]
        now = free_at[rank]
        if progress.weights[stage] < progress.gradients[stage]:
            progress.start[rank] = now
        for microbatch in range(progress.forwards[stage], count):
            forward = (stage * count + microbatch) * KINDS + FORWARD
            now = max(now, done[tables.needs[forward]] + tables.lag[forward])
            if microbatch == progress.forwards[stage]:
                progress.start[rank] = min(progress.start[rank], now)
            now += tables.seconds[forward]
            end = tables.yields[forward]
            done[end] = now
            bound = max(bound, now + ends.rest[end])
    return bound


@compiled
def _run_gradients(tables: Tables, progress: OrderProgress, ends: Ends) -> int:
    """Write the ends of the remaining gradients, and the start of each rank's next action. Return a lower bound."""
    count = tables.num_microbatches
    seconds = tables.seconds
    done = progress.times.done
    bound = 0
    for stage in range(tables.num_stages - 1, -1, -1):
        rank = tables.rank_of[stage]
        now = progress.times.free_at[rank]
        for microbatch in range(progress.gradients[stage], count):
            pair = (stage * count + microbatch) * KINDS
            forward, gradient, backward = pair + FORWARD, pair + INPUT_GRAD, pair + BACKWARD
            now = max(now, done[tables.yields[forward]], done[tables.needs[gradient]] + tables.lag[gradient])
            if microbatch == progress.gradients[stage]:
                progress.start[rank] = min(progress.start[rank], now)
            end = tables.yields[gradient]
            bound = max(bound, now + ends.rest[end])
            now += min(seconds[gradient], seconds[backward])
            done[end] = now
    return bound


@compiled
def dominates(tables: Tables, ends: Ends, states: Whole, one: int, other: int) -> bool:
    """Return whether one partial order dominates another.

    It does if both contain the same actions, and each remaining action can start at least as early after the first as
    after the second. ``one`` and ``other`` are their positions in ``states``, in the order of `store`: the counts of
    actions, the times at which the ranks are free, and the ends of actions.
    """
    for at in range(3 * tables.num_stages):
        if states[one + at] != states[other + at]:
            return False
    one += 3 * tables.num_stages
    other += 3 * tables.num_stages
    for rank in range(tables.num_ranks):
        if states[one + rank] > states[other + rank]:
            return False
    free_at = other
    one += tables.num_ranks
    other += tables.num_ranks
    for end in range(len(ends.rest)):
        late = states[one + end] > states[other + end]
        if late and states[one + end] + ends.lag[end] > states[free_at + ends.rank[end]]:
            return False
    return True
