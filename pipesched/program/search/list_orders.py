"""List scheduling for given times: writes the orders of all ranks action by action, sorted by start.

A rank with limited memory starts a forward only if it can then still finish all micro-batches that it holds, one after
the other, oldest first (the banker's algorithm, Dijkstra 1965). All other choices are set by a rule, which is a
sequence of numbers. No rule leads to a deadlock, and no rule is best for all problems.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd
from typing import NamedTuple

from pipesched.program.search.bound import ranks_that_must_fuse
from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.evaluation import UNFIT, RunTimes, Sequences, assign, run_times
from pipesched.program.search.problem import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, OrderProblem, Tables

__all__ = [
    "CHOICES",
    "DEPTH",
    "FILLING",
    "FIRST_APART",
    "FUSED",
    "IN_TURN",
    "LAST_APART",
    "NONE_OWED",
    "PATIENCE",
    "WINDOW",
    "OrderProgress",
    "account",
    "fits",
    "progress_of",
    "reset",
    "roomy",
    "rules",
    "write",
]

_ONE = 256  # fixed point: 1.0
_NEVER = 1 << 53  # later than every start
_NONE = -1
_GOLDEN = 0.618  # multiples of the golden ratio spread evenly
#: The choices of a rank. A rule has a number for each choice and rank; choice c of rank r is at c x ranks + r.
#:
#: WINDOW: the maximum number of micro-batches by which the rank's forwards are ahead of its oldest unfinished one.
#: IN_TURN: 1: forwards and backwards alternate; 0: a backward comes before a forward.
#: FILLING: the fraction of a weight gradient's time that a gap must have, in 1/256. If negative, a weight gradient runs
#: without waiting for a gap.
#: PATIENCE: the maximum time by which an action with a higher priority may start later than the earliest action, in
#: 1/256 of the duration of the later action.
#: DEPTH: which of several forwards comes first. 0: the one on the deepest stage; 1: the one on the shallowest stage; 2:
#: the one of the oldest micro-batch.
#: FUSED: the stages that run a B instead of I and W while they owe no W. 0: none; 1: the first stage; 2: every stage.
#: FIRST_APART: the number of micro-batches at the start of the step that run I and W on every stage.
#: LAST_APART: the number of micro-batches at the end of the step that run I and W on every stage.
WINDOW, IN_TURN, FILLING, PATIENCE, DEPTH, FUSED, FIRST_APART, LAST_APART = range(8)
CHOICES = 8
#: Values of FUSED.
FIRST_STAGE, NONE_OWED = 1, 2


def rules(problem: OrderProblem, bound: int) -> Iterator[Whole]:
    """Yield rules that make the same choices for all ranks. Only FUSED may differ between ranks.

    Similar rules are far apart in the sequence, so that the first few rules already differ in most choices.
    """
    ranks, most = problem.num_ranks, problem.num_microbatches
    windows = sorted({min(most, max(1, window)) for window in (ranks // 2, ranks, 2 * ranks, most)}, reverse=True)
    several = max(map(len, problem.chunks)) > 1
    depths = (0, 2, 1) if several else (0,)
    fusions = list(_fusions(problem, bound))
    choices = list(product(depths, (0, 1), (0, 77, 128), (256, 179, 77, 0), windows))
    stride = next(step for step in range(int(len(choices) * _GOLDEN), 2 * len(choices)) if gcd(step, len(choices)) == 1)
    for number in range(len(choices)):
        depth, in_turn, patience, filling, window = choices[number * stride % len(choices)]
        own = {WINDOW: window, IN_TURN: in_turn, FILLING: filling, PATIENCE: patience, DEPTH: depth}
        same = [own.get(choice, 0) for choice in range(CHOICES) for _ in range(ranks)]
        for fused, last_apart in fusions:
            same[FUSED * ranks : (FUSED + 1) * ranks] = fused
            same[LAST_APART * ranks : (LAST_APART + 1) * ranks] = [last_apart] * ranks
            yield whole(same)


def _fusions(problem: OrderProblem, bound: int) -> Iterator[tuple[list[int], int]]:
    """Yield pairs: the value of FUSED for each rank, and one value of LAST_APART for all ranks."""
    ranks = problem.num_ranks
    yield [0] * ranks, 0
    if problem.fuses:
        yield [FIRST_STAGE] * ranks, 0
        must_fuse = ranks_that_must_fuse(problem, bound)
        for fused in ([True] * ranks, must_fuse):
            if any(fused):
                for last_apart in (0, ranks - 1):
                    yield [NONE_OWED * each for each in fused], last_apart


class OrderProgress(NamedTuple):
    """The state of all ranks and stages while orders are written. A W is owed if its I is written but the W is not."""

    times: RunTimes
    #: For each stage, the micro-batch of its next F.
    forwards: Whole
    #: For each stage, the micro-batch of its next I or B.
    gradients: Whole
    #: For each stage, the micro-batch of its next W; micro-batches with a B are skipped.
    weights: Whole
    #: Whether each (stage, micro-batch) pair has a B: 1 or 0.
    fused: Whole
    #: For each resource and rank, the amount held.
    held: Whole
    #: For each resource and rank, the amount that the owed W will give back.
    owed: Whole
    #: The next action of each rank.
    choice: Whole
    #: The start of each rank's next action; _NEVER if no action can run.
    start: Whole
    #: The next F and the next gradient of each stage; -1 if it cannot run.
    option: Whole
    #: The starts of the actions in ``option``.
    option_start: Whole
    #: Whether the last action of each rank, not counting W, was a forward: 1 or 0.
    forward_last: Whole
    #: For each rank, the shortest total time of the actions that it has not run yet.
    left: Whole
    #: For each rank, the shortest total time of all its actions.
    work: Whole


def progress_of(tables: Tables) -> OrderProgress:
    """Allocate the state of all ranks and stages, and add up the work of each rank."""
    stages, ranks = [0] * tables.num_stages, [0] * tables.num_ranks
    amounts = [0] * (tables.num_resources * tables.num_ranks)
    progress = OrderProgress(
        run_times(tables),
        forwards=whole(stages),
        gradients=whole(stages),
        weights=whole(stages),
        fused=whole([0] * (tables.num_stages * tables.num_microbatches)),
        held=whole(amounts),
        owed=whole(amounts),
        choice=whole(ranks),
        start=whole(ranks),
        option=whole(2 * stages),
        option_start=whole(2 * stages),
        forward_last=whole(ranks),
        left=whole(ranks),
        work=whole(ranks),
    )
    _add_work(tables, progress.work)
    return progress


@compiled
def _add_work(tables: Tables, work: Whole) -> None:
    """Add the shortest time of each forward and backward to the work of its rank."""
    seconds = tables.seconds
    for pair in range(tables.num_stages * tables.num_microbatches):
        code = pair * KINDS
        apart = seconds[code + INPUT_GRAD] + seconds[code + WEIGHT_GRAD]
        rank = tables.rank_of[tables.stage_of[pair]]
        work[rank] += seconds[code] + min(apart, seconds[code + BACKWARD])


@compiled
def reset(tables: Tables, progress: OrderProgress) -> None:
    """Reset the state: no action is written yet."""
    assign(tables.blank, progress.times.done)
    for row in (progress.forwards, progress.gradients, progress.weights, progress.fused):
        for at in range(len(row)):
            row[at] = 0
    for row in (progress.held, progress.owed, progress.forward_last):
        for at in range(len(row)):
            row[at] = 0
    for rank in range(len(progress.work)):
        progress.times.free_at[rank] = 0
        progress.left[rank] = progress.work[rank]


@compiled
def write(tables: Tables, rule: Whole, progress: OrderProgress, orders: Sequences, most: int) -> int:
    """Write the orders that follow from a rule, and return their makespan.

    Return UNFIT if the limits are too tight for these orders, or if their makespan is above ``most``.
    """
    reset(tables, progress)
    left = tables.num_stages * tables.num_microbatches * 2  # an F and a B or W for each pair; an I does not count
    for rank in range(tables.num_ranks):
        orders.lengths[rank] = 0
        orders.busy[rank] = 0
        _choose(tables, rule, progress, rank)
    while left > 0:
        rank = 0
        for other in range(1, tables.num_ranks):
            if progress.start[other] < progress.start[rank]:
                rank = other
        if progress.start[rank] == _NEVER:
            return UNFIT
        code = progress.choice[rank]
        _run(tables, progress, orders, rank, code)
        if progress.times.free_at[rank] + progress.left[rank] > most:
            return UNFIT
        kind = code % KINDS
        if kind != INPUT_GRAD:
            left -= 1
        _choose(tables, rule, progress, rank)
        neighbour = _waiting(tables, progress, code)
        if neighbour >= 0 and neighbour != rank:
            _choose(tables, rule, progress, neighbour)
    makespan = 0
    for rank in range(tables.num_ranks):
        makespan = max(makespan, progress.times.free_at[rank])
    return makespan


@compiled
def _waiting(tables: Tables, progress: OrderProgress, code: int) -> int:
    """Return the rank whose next F, I or B on a stage needs the action ``code``; -1 if no rank needs it."""
    pair = code // KINDS
    stage = tables.stage_of[pair]
    microbatch = pair - stage * tables.num_microbatches
    kind = code % KINDS
    if kind == FORWARD:
        waits = stage + 1 < tables.num_stages and progress.forwards[stage + 1] == microbatch
        return tables.rank_of[stage + 1] if waits else _NONE
    waits = kind != WEIGHT_GRAD and stage > 0 and progress.gradients[stage - 1] == microbatch
    return tables.rank_of[stage - 1] if waits else _NONE


@compiled
def _run(tables: Tables, progress: OrderProgress, orders: Sequences, rank: int, code: int) -> None:
    """Append an action to a rank's order."""
    slot = tables.first[rank] + orders.lengths[rank]
    seconds = tables.seconds
    orders.slots[slot] = code
    orders.lengths[rank] += 1
    orders.busy[rank] += seconds[code]
    end = progress.start[rank] + seconds[code]
    progress.times.free_at[rank] = end
    progress.times.done[tables.yields[code]] = end
    pair = code // KINDS
    kind = code % KINDS
    stage = tables.stage_of[pair]
    if kind == FORWARD:
        progress.forwards[stage] += 1
        progress.forward_last[rank] = 1
    elif kind == WEIGHT_GRAD:
        progress.weights[stage] += 1
    else:
        progress.gradients[stage] += 1
        progress.forward_last[rank] = 0
        progress.fused[pair] = 1 if kind == BACKWARD else 0
    _skip_fused(tables, progress, stage)
    account(tables, progress, rank, code)


@compiled
def account(tables: Tables, progress: OrderProgress, rank: int, code: int) -> None:
    """Update the remaining time of a rank after an action, and the amounts that the rank holds and owes."""
    seconds = tables.seconds
    kind = code % KINDS
    first = code - kind
    later = first + WEIGHT_GRAD
    if kind in (FORWARD, WEIGHT_GRAD):
        progress.left[rank] -= seconds[code]
    else:
        progress.left[rank] -= min(seconds[first + INPUT_GRAD] + seconds[later], seconds[first + BACKWARD])
        if kind == INPUT_GRAD:
            progress.left[rank] += seconds[later]
    codes = tables.num_stages * tables.num_microbatches * KINDS
    for resource in range(tables.num_resources):
        at = resource * tables.num_ranks + rank
        net = tables.takes[resource * codes + code] - tables.gives[resource * codes + code]
        progress.held[at] += net
        if kind == INPUT_GRAD:
            progress.owed[at] += tables.gives[resource * codes + later] - tables.takes[resource * codes + later]
        elif kind == WEIGHT_GRAD:
            progress.owed[at] += net


@compiled
def _skip_fused(tables: Tables, progress: OrderProgress, stage: int) -> None:
    """Advance a stage's next W past the micro-batches that have a B."""
    pair = stage * tables.num_microbatches + progress.weights[stage]
    while progress.weights[stage] < progress.gradients[stage] and progress.fused[pair]:
        progress.weights[stage] += 1
        pair += 1


@compiled
def _choose(tables: Tables, rule: Whole, progress: OrderProgress, rank: int) -> None:
    """Choose the next action of a rank, and write the action and its start to ``progress``."""
    now = progress.times.free_at[rank]
    begin = tables.first_chunk[rank]
    stop = tables.first_chunk[rank + 1]
    oldest = tables.num_microbatches
    for at in range(begin, stop):
        oldest = min(oldest, progress.gradients[tables.chunks[at]])
    window = oldest + rule[WINDOW * tables.num_ranks + rank]
    earliest = _NEVER
    blocked = _NEVER
    for at in range(begin, stop):
        stage = tables.chunks[at]
        for forward in range(2):
            if forward:
                code = _forward(tables, progress, rank, stage, window)
            else:
                code = _gradient(tables, rule, progress, rank, stage)
            option = 2 * stage + forward
            progress.option[option] = _NONE
            if code < 0:
                continue
            start = _ready(tables, progress, now, code)
            if fits(tables, progress, rank, code):
                progress.option[option] = code
                progress.option_start[option] = start
                earliest = min(earliest, start)
            else:
                blocked = min(blocked, start)
    owed = _oldest_owed(tables, progress, rank)
    if owed >= 0:
        gap = earliest - now
        filling = rule[FILLING * tables.num_ranks + rank]
        fills = filling < 0 or (gap > 0 and gap * _ONE >= filling * tables.seconds[owed])
        if fills or (blocked <= earliest and blocked < _NEVER):
            progress.choice[rank] = owed
            progress.start[rank] = now
            return
    _prefer(tables, rule, progress, rank, earliest)


@compiled
def _prefer(tables: Tables, rule: Whole, progress: OrderProgress, rank: int, earliest: int) -> None:
    """Choose the next action among those of a rank that can start at about the same time."""
    progress.start[rank] = _NEVER
    if earliest == _NEVER:
        return
    in_turn = rule[IN_TURN * tables.num_ranks + rank]
    patience = rule[PATIENCE * tables.num_ranks + rank]
    depth = rule[DEPTH * tables.num_ranks + rank]
    turn = 1 if in_turn and not progress.forward_last[rank] else 0  # 1: forwards come first
    best = -_NEVER
    for at in range(tables.first_chunk[rank], tables.first_chunk[rank + 1]):
        stage = tables.chunks[at]
        for forward in range(2):
            code = progress.option[2 * stage + forward]
            start = progress.option_start[2 * stage + forward]
            if code < 0 or (start - earliest) * _ONE > patience * tables.seconds[code]:
                continue
            rating = _rating(tables, depth, code)
            if forward != turn:
                rating -= 1 << 50
            if rating > best:
                best = rating
                progress.choice[rank] = code
                progress.start[rank] = start


@compiled
def _rating(tables: Tables, depth: int, code: int) -> int:
    """Return the priority of a forward among forwards, or of a backward among backwards."""
    stage = tables.stage_of[code // KINDS]
    if code % KINDS != FORWARD or depth == 1:
        return -stage
    if depth == 0:
        return stage
    microbatch = code // KINDS - stage * tables.num_microbatches
    return stage - microbatch * tables.num_stages


@compiled
def _ready(tables: Tables, progress: OrderProgress, now: int, code: int) -> int:
    """Return the time at which an action can start if its rank is free at ``now``."""
    return max(now, progress.times.done[tables.needs[code]] + tables.lag[code])


@compiled
def fits(tables: Tables, progress: OrderProgress, rank: int, code: int) -> bool:
    """Return whether an action fits in the rank's memory now."""
    codes = tables.num_stages * tables.num_microbatches * KINDS
    for resource in range(tables.num_resources):
        at = resource * tables.num_ranks + rank
        if progress.held[at] + tables.takes[resource * codes + code] > tables.limits[at]:
            return False
    return True


@compiled
def _oldest_owed(tables: Tables, progress: OrderProgress, rank: int) -> int:
    """Return the W with the lowest micro-batch number among those that a rank owes; -1 if it owes none."""
    count = tables.num_microbatches
    best = _NONE
    oldest = count
    for at in range(tables.first_chunk[rank], tables.first_chunk[rank + 1]):
        stage = tables.chunks[at]
        microbatch = progress.weights[stage]
        if microbatch < progress.gradients[stage] and microbatch <= oldest:
            oldest = microbatch
            best = (stage * count + microbatch) * KINDS + WEIGHT_GRAD
    return best


@compiled
def _gradient(tables: Tables, rule: Whole, progress: OrderProgress, rank: int, stage: int) -> int:
    """Return the next I or B of a stage; -1 if there is none, or if the action that it needs is not written yet."""
    microbatch = progress.gradients[stage]
    if microbatch >= progress.forwards[stage]:
        return _NONE
    pair = stage * tables.num_microbatches + microbatch
    code = pair * KINDS + INPUT_GRAD
    if progress.times.done[tables.needs[code]] < 0:
        return _NONE
    ranks = tables.num_ranks
    fused = rule[FUSED * ranks + rank]
    if progress.weights[stage] < microbatch or fused == 0:
        return code
    last = tables.num_microbatches - rule[LAST_APART * ranks + rank]
    if microbatch < rule[FIRST_APART * ranks + rank] or microbatch >= last:
        return code
    return code - INPUT_GRAD + BACKWARD if fused == NONE_OWED or stage == 0 else code


@compiled
def _forward(tables: Tables, progress: OrderProgress, rank: int, stage: int, window: int) -> int:
    """Return the next F of a stage; -1 if there is none, or if it cannot run yet.

    It cannot run if the F that computes its input is not written yet, its micro-batch is not below ``window``, or the
    rank has no room for it.
    """
    microbatch = progress.forwards[stage]
    if microbatch >= min(window, tables.num_microbatches):
        return _NONE
    code = (stage * tables.num_microbatches + microbatch) * KINDS
    if progress.times.done[tables.needs[code]] < 0:
        return _NONE
    for resource in range(tables.num_resources):
        if not roomy(tables, progress, rank, resource, stage):
            return _NONE
    return code


@compiled
def roomy(tables: Tables, progress: OrderProgress, rank: int, resource: int, stage: int) -> bool:
    """Return whether a rank has enough of a resource to run a stage's next F and then finish all its micro-batches."""
    at = resource * tables.num_ranks + rank
    base = resource * tables.num_stages * tables.num_microbatches * KINDS
    count = tables.num_microbatches
    code = base + (stage * count + progress.forwards[stage]) * KINDS
    free = tables.limits[at] - progress.held[at] + progress.owed[at] - tables.takes[code]
    if free < 0:
        return False
    free += tables.gives[code]
    oldest = count
    newest = 0
    for chunk in range(tables.first_chunk[rank], tables.first_chunk[rank + 1]):
        other = tables.chunks[chunk]
        oldest = min(oldest, progress.gradients[other])
        newest = max(newest, progress.forwards[other] + int(other == stage))
    enough = tables.enough[at]
    for microbatch in range(oldest, newest):
        if free >= enough:  # it stays so, because a finished micro-batch gives back all that it takes
            return True
        back = 0
        peak = 0
        for chunk in range(tables.first_chunk[rank], tables.first_chunk[rank + 1]):
            other = tables.chunks[chunk]
            if progress.gradients[other] > microbatch:
                continue
            code = base + (other * count + microbatch) * KINDS
            if progress.forwards[other] + int(other == stage) <= microbatch:
                free -= tables.takes[code]
                if free < 0:
                    return False
                free += tables.gives[code]
            back += tables.takes[code] - tables.gives[code]
            peak = max(peak, min(tables.takes[code + INPUT_GRAD], tables.takes[code + BACKWARD]))
        if peak > free:
            return False
        free += back
    return True
