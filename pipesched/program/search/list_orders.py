"""List scheduling for given times: writes the orders of all ranks action by action, the earliest start first.

A rank that could run out of memory starts a forward only if it could then finish all micro-batches that it holds, one
after the other, oldest first (the banker's algorithm, Dijkstra 1965). So no rule leads to a deadlock. A `Rule` sets the
remaining choices; no rule is best for all problems.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd
from typing import NamedTuple

from pipesched.program.search.compiled import Whole, compiled, whole
from pipesched.program.search.evaluation import UNFIT, Clocks, Sequences, clocks
from pipesched.program.search.problem import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, Problem, Tables

__all__ = ["ListScheduler", "Rule", "rules"]

_ONE = 256  # fixed point: 1.0
_NEVER = 1 << 53  # later than every start
_GOLDEN = 0.618  # multiples of the golden ratio spread evenly
_FIRST_STAGE, _NONE_OWED = 1, 2  # values of ``Rule.fused``


class Rule(NamedTuple):
    """The choices of a list schedule."""

    #: The most micro-batches by which a rank's forwards are ahead of its oldest unfinished micro-batch.
    window: int
    #: Whether a rank runs forwards and backwards in turn, 1 or 0; otherwise a backward comes before a forward.
    in_turn: int
    #: The share of a weight gradient that must fit in a gap, in 1/256.
    filling: int
    #: The delay of a preferred action after the earliest possible start that is accepted, in 1/256 of its time.
    patience: int
    #: The forward that comes first: 0: of the deepest stage, 1: of the shallowest stage, 2: of the oldest micro-batch.
    depth: int
    #: Where a B replaces I and W: 0: nowhere, 1: on the first stage, 2: wherever all earlier W of the stage have run.
    fused: int


def rules(problem: Problem) -> Iterator[Rule]:
    """Yield the rules worth trying, shuffled, so that the first few already differ in every choice."""
    ranks, most = problem.num_ranks, problem.num_microbatches
    windows = sorted({min(most, max(1, window)) for window in (ranks // 2, ranks, 2 * ranks, most)}, reverse=True)
    several = max(map(len, problem.chunks)) > 1
    depths = (0, 2, 1) if several else (0,)
    fused = (0, _FIRST_STAGE, _NONE_OWED) if problem.fuses else (0,)
    choices = list(product(depths, fused, (0, 1), (0, 77, 128), (256, 179, 77, 0), windows))
    stride = next(step for step in range(int(len(choices) * _GOLDEN), 2 * len(choices)) if gcd(step, len(choices)) == 1)
    for number in range(len(choices)):
        depth, fuse, in_turn, patience, filling, window = choices[number * stride % len(choices)]
        yield Rule(window, in_turn, filling, patience, depth, fuse)


class _Progress(NamedTuple):
    """The state of all ranks and stages while orders are written. A W is owed from its I until the W is written."""

    clocks: Clocks
    #: For each stage, its next F.
    forwards: Whole
    #: For each stage, its next I or B.
    gradients: Whole
    #: For each stage, its next W; fused micro-batches are skipped.
    weights: Whole
    #: Whether each (stage, micro-batch) pair has a B: 1 or 0.
    fused: Whole
    #: For each resource and rank, the amount held, and the amount that the owed W will give back.
    held: Whole
    owed: Whole
    #: The next action of each rank, or -1, and its start.
    choice: Whole
    start: Whole
    #: Whether the last action of each rank but W was a forward: 1 or 0.
    forward_last: Whole


class ListScheduler:
    """Writes list schedules of a problem.

    Args:
        tables: the problem.

    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def write(self, rule: Rule, orders: Sequences) -> int:
        """Write the orders by a rule. Return their makespan, or UNFIT if the limits are too tight for it."""
        tables = self._tables
        stages, ranks = [0] * tables.num_stages, [0] * tables.num_ranks
        pairs = [0] * (tables.num_stages * tables.num_microbatches)
        amounts = [0] * (tables.num_resources * tables.num_ranks)
        progress = _Progress(
            clocks(tables),
            forwards=whole(stages),
            gradients=whole(stages),
            weights=whole(stages),
            fused=whole(pairs),
            held=whole(amounts),
            owed=whole(amounts),
            choice=whole(ranks),
            start=whole(ranks),
            forward_last=whole(ranks),
        )
        return int(_write(tables, rule, progress, orders))


@compiled
def _write(tables: Tables, rule: Rule, progress: _Progress, orders: Sequences) -> int:
    left = tables.num_stages * tables.num_microbatches * 2  # all F, and an I or a B of each; each I adds a W
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
        kind = code % KINDS
        if kind != INPUT_GRAD:
            left -= 1
        _choose(tables, rule, progress, rank)
        stage = code // KINDS // tables.num_microbatches
        if kind == FORWARD and stage + 1 < tables.num_stages:
            _choose(tables, rule, progress, tables.rank_of[stage + 1])
        if kind in (INPUT_GRAD, BACKWARD) and stage > 0:
            _choose(tables, rule, progress, tables.rank_of[stage - 1])
    makespan = 0
    for rank in range(tables.num_ranks):
        makespan = max(makespan, progress.clocks.clock[rank])
    return makespan


@compiled
def _run(tables: Tables, progress: _Progress, orders: Sequences, rank: int, code: int) -> None:
    """Append an action to a rank's order."""
    slot = tables.first[rank] + orders.lengths[rank]
    orders.slots[slot] = code
    orders.lengths[rank] += 1
    orders.busy[rank] += tables.seconds[code]
    end = progress.start[rank] + tables.seconds[code]
    progress.clocks.clock[rank] = end
    progress.clocks.done[tables.yields[code]] = end
    pair = code // KINDS
    kind = code % KINDS
    stage = pair // tables.num_microbatches
    if kind == FORWARD:
        progress.forwards[stage] += 1
        progress.forward_last[rank] = 1
    elif kind == WEIGHT_GRAD:
        progress.weights[stage] += 1
    else:
        progress.gradients[stage] += 1
        progress.forward_last[rank] = 0
        progress.fused[pair] = 1 if kind == BACKWARD else 0
    codes = tables.num_stages * tables.num_microbatches * KINDS
    for resource in range(tables.num_resources):
        at = resource * tables.num_ranks + rank
        net = tables.takes[resource * codes + code] - tables.gives[resource * codes + code]
        progress.held[at] += net
        later = resource * codes + pair * KINDS + WEIGHT_GRAD
        if kind == INPUT_GRAD:
            progress.owed[at] += tables.gives[later] - tables.takes[later]
        elif kind == WEIGHT_GRAD:
            progress.owed[at] += net


@compiled
def _choose(tables: Tables, rule: Rule, progress: _Progress, rank: int) -> None:
    """Choose the next action of a rank and its start."""
    now = progress.clocks.clock[rank]
    owed = _oldest_owed(tables, progress, rank)
    earliest = _NEVER
    blocked = _NEVER
    for at in range(tables.first_chunk[rank], tables.first_chunk[rank + 1]):
        stage = tables.chunks[at]
        code = _gradient(tables, rule, progress, stage)
        if code >= 0:
            start = _ready(tables, progress, now, code)
            if _fits(tables, progress, rank, code):
                earliest = min(earliest, start)
            else:
                blocked = min(blocked, start)
        code = _forward(tables, rule, progress, rank, stage)
        if code >= 0:
            start = _ready(tables, progress, now, code)
            if _fits(tables, progress, rank, code):
                earliest = min(earliest, start)
            else:
                blocked = min(blocked, start)
    gap = earliest - now
    fills = owed >= 0 and gap > 0 and gap * _ONE >= rule.filling * tables.seconds[owed]
    if owed >= 0 and (fills or (blocked <= earliest and blocked < _NEVER)):
        progress.choice[rank] = owed
        progress.start[rank] = now
    else:
        _prefer(tables, rule, progress, rank, earliest)


@compiled
def _prefer(tables: Tables, rule: Rule, progress: _Progress, rank: int, earliest: int) -> None:
    """Choose between the actions of a rank that can start at about the same time."""
    now = progress.clocks.clock[rank]
    progress.start[rank] = _NEVER
    if earliest == _NEVER:
        return
    turn = 1 if rule.in_turn and not progress.forward_last[rank] else 0  # 1: forwards come first
    best = -_NEVER
    for at in range(tables.first_chunk[rank], tables.first_chunk[rank + 1]):
        stage = tables.chunks[at]
        for forward in range(2):
            if forward:
                code = _forward(tables, rule, progress, rank, stage)
            else:
                code = _gradient(tables, rule, progress, stage)
            if code < 0 or not _fits(tables, progress, rank, code):
                continue
            start = _ready(tables, progress, now, code)
            if (start - earliest) * _ONE > rule.patience * tables.seconds[code]:
                continue
            rating = _rating(tables, rule, code)
            if forward != turn:
                rating -= 1 << 50
            if rating > best:
                best = rating
                progress.choice[rank] = code
                progress.start[rank] = start


@compiled
def _rating(tables: Tables, rule: Rule, code: int) -> int:
    """Return the priority of an action among forwards or among backwards."""
    stage = code // KINDS // tables.num_microbatches
    if code % KINDS != FORWARD or rule.depth == 1:
        return -stage
    if rule.depth == 0:
        return stage
    microbatch = code // KINDS % tables.num_microbatches
    return stage - microbatch * tables.num_stages


@compiled
def _ready(tables: Tables, progress: _Progress, now: int, code: int) -> int:
    """Return when an action of a rank that is free at ``now`` can start."""
    return max(now, progress.clocks.done[tables.needs[code]] + tables.lag[code])


@compiled
def _fits(tables: Tables, progress: _Progress, rank: int, code: int) -> bool:
    """Return whether an action fits in the rank's memory now."""
    codes = tables.num_stages * tables.num_microbatches * KINDS
    for resource in range(tables.num_resources):
        at = resource * tables.num_ranks + rank
        if progress.held[at] + tables.takes[resource * codes + code] > tables.limits[at]:
            return False
    return True


@compiled
def _oldest_owed(tables: Tables, progress: _Progress, rank: int) -> int:
    """Return the owed W of a rank with the lowest micro-batch; -1 if no W is owed."""
    count = tables.num_microbatches
    best = -1
    for at in range(tables.first_chunk[rank], tables.first_chunk[rank + 1]):
        stage = tables.chunks[at]
        microbatch = progress.weights[stage]
        while microbatch < progress.gradients[stage] and progress.fused[stage * count + microbatch]:
            microbatch += 1
        progress.weights[stage] = microbatch
        if microbatch < progress.gradients[stage] and (best < 0 or microbatch <= best // KINDS % count):
            best = (stage * count + microbatch) * KINDS + WEIGHT_GRAD
    return best


@compiled
def _gradient(tables: Tables, rule: Rule, progress: _Progress, stage: int) -> int:
    """Return the next I or B of a stage, or -1 if there is none or its input is not known yet."""
    microbatch = progress.gradients[stage]
    if microbatch >= progress.forwards[stage]:
        return -1
    pair = stage * tables.num_microbatches + microbatch
    code = pair * KINDS + INPUT_GRAD
    if progress.clocks.done[tables.needs[code]] < 0:
        return -1
    if progress.weights[stage] < microbatch or rule.fused == 0:
        return code
    return code - INPUT_GRAD + BACKWARD if rule.fused == _NONE_OWED or stage == 0 else code


@compiled
def _forward(tables: Tables, rule: Rule, progress: _Progress, rank: int, stage: int) -> int:
    """Return the next F of a stage, or -1 if there is none, its input is not known yet, or it must wait."""
    microbatch = progress.forwards[stage]
    if microbatch >= tables.num_microbatches:
        return -1
    code = (stage * tables.num_microbatches + microbatch) * KINDS
    if progress.clocks.done[tables.needs[code]] < 0:
        return -1
    oldest = progress.gradients[stage]
    for at in range(tables.first_chunk[rank], tables.first_chunk[rank + 1]):
        oldest = min(oldest, progress.gradients[tables.chunks[at]])
    if microbatch >= oldest + rule.window:
        return -1
    for resource in range(tables.num_resources):
        if not _roomy(tables, progress, rank, resource, stage):
            return -1
    return code


@compiled
def _roomy(tables: Tables, progress: _Progress, rank: int, resource: int, stage: int) -> bool:
    """Return whether a rank can still finish all micro-batches that it holds, after one more F of a stage."""
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
    for microbatch in range(oldest, newest):
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
