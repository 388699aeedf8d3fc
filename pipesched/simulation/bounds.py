"""Bounds: lower bounds on the step time of any schedule, which limit how far a schedule can be from the optimum.

Three bounds are computed for every rank. They generalise relaxations used in zero-bubble scheduling (Qi et al. 2023,
arXiv:2401.10241) to any placement:

- One machine: earliest start + work + shortest time to the end, for any part of a rank's work (Carlier 1982).
- In turns: if a stage can hold n micro-batches, forward number n + 1 waits until the stage releases a micro-batch.
- Little's law: the number of (stage, micro-batch) pairs in flight = rate x lifetime. If this number is limited, long
  lifetimes require a long step.

If a rank has several stages, the last two bounds are also computed for each part of a micro-batch's path through this
rank's stages (`_segments`). If ``effort`` is above 0, a search through all orders of one rank's actions gives another
bound (`pipesched.simulation.relaxation.label_bound`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any

from pipesched.checks import as_list, is_count
from pipesched.errors import ScheduleError
from pipesched.program.liveness import rank_limits
from pipesched.program.placement import Placement, chunks_of
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs, check_costs
from pipesched.simulation.relaxation.chain_costs import StageTimes, stage_times
from pipesched.simulation.relaxation.label_bound import label_bound
from pipesched.units import counted

__all__ = ["lower_bound", "program_bound"]

_EFFORT = 4_000_000


def lower_bound(
    costs: Costs,
    num_microbatches: int,
    *,
    placement: Placement | None = None,
    max_in_flight: int | Sequence[int] | None = None,
    split: bool = True,
    effort: int = _EFFORT,
) -> float:
    """Return a lower bound on the makespan of every valid program for a chain of stages with these costs.

    A gap between a schedule and the bound means that the schedule is not optimal, or that the bound is loose (finding
    the optimum is NP-hard). Whole numbers and Fractions give exact results; floats are subject to rounding.

    Under ``max_in_flight``, a rank holds a (stage, micro-batch) pair from the start of its F. Pass no limit for
    programs with recompute, because such programs hold a recomputed pair only after its R has started.

    ::

        pipesched.lower_bound(pipesched.Costs.uniform(4), num_microbatches=8)

    Args:
        costs: the costs of each stage.
        num_microbatches: the number of micro-batches, at least 1.
        placement: the rank of each stage. Default: one rank per stage.
        max_in_flight: the maximum number of (stage, micro-batch) pairs that a rank may hold at the same time: one
            number, or one per rank. Default: no limit.
        split: whether each backward can be one B, or an I and a W, whichever is faster. If False, every backward is
            a B. Default: True.
        effort: the maximum number of values to compute while searching through the orders of each rank's actions; 10
            million values take about a second. With 0, only formulas are used. The bound does not depend on the speed
            of the machine. Default: 4,000,000.

    Returns:
        The bound in seconds.

    Raises:
        ScheduleError: for an invalid placement, limit, effort or number of micro-batches.

    """
    check_costs(costs)
    rule = "a placement must be a list with the rank of each stage"
    ranks_of = (
        range(costs.num_stages) if placement is None else as_list(placement, rule, ("for example, pass (0, 1, 0, 1)"))
    )
    placement = tuple(ranks_of)
    _check(costs, num_microbatches, placement)
    if not is_count(effort, 0):
        raise ScheduleError(f"effort must be a whole number, at least 0; got {effort!r}; pass 0 or more")
    if costs.overlap < 1:  # as if every action overlapped with another
        costs = costs.scaled(costs.overlap)
    stages = stage_times(costs, placement, split)
    ranks = sorted(set(placement))
    held = {rank: [stages[stage] for stage in chunks_of(placement, rank)] for rank in ranks}
    limits = _limits(max_in_flight, {rank: len(chunks) for rank, chunks in held.items()}, num_microbatches)
    bounds: list[float] = []
    for rank, chunks in held.items():
        limit = limits[rank]
        bounds.append(_one_machine(chunks, num_microbatches, limit))
        if limit < num_microbatches * len(chunks):
            segments = list(_segments(chunks, num_microbatches, limit))
            bounds += [_in_turns(segment, num_microbatches) for segment in segments]
            bounds += [_littles_law_of_segment(segment, num_microbatches) for segment in segments]
            bounds += [_littles_law(chunks, num_microbatches, limit)]
    bound = max(bounds, default=0)
    if effort and bound:
        bound = label_bound(costs, placement, limits, num_microbatches, low=bound, effort=effort, split=split)
    return bound


def program_bound(program: Program, costs: Costs, *, effort: int = 0) -> float | None:
    """Return a lower bound on the makespan of all programs with this program's stages, placement and micro-batches.

    The bound holds whether or not backwards are split. If the stages are not a single chain, the bound is weaker,
    and ``effort`` (as in ``lower_bound``) is ignored. Returns the bound in seconds, or None for a forward-only program.
    """
    if program.forward_only:
        return None
    if program.is_chain:
        return lower_bound(costs, program.num_microbatches, placement=program.placement, effort=effort)
    return _of_graph(program, costs if costs.overlap >= 1 else costs.scaled(costs.overlap))


def _of_graph(program: Program, costs: Costs) -> float:
    """Return a lower bound on the makespan in seconds, for any stage graph, even if micro-batches skip stages.

    Only forwards can run on a rank before its first gradient arrives. After a rank has computed its last gradient, the
    backwards of earlier stages still have to run.
    """
    graph = program.graph
    placement = program.placement
    gradient = [min(i, b) for i, b in zip(costs.input_grad_s, costs.backward_s, strict=True)]
    whole = [min(i + w, b) for i, w, b in zip(costs.input_grad_s, costs.weight_grad_s, costs.backward_s, strict=True)]

    def lag(a: int, b: int) -> float:
        return costs.transfer_s if placement[a] != placement[b] else 0

    start: list[float] = [0] * program.num_stages
    turn = start.copy()
    down = start.copy()
    for s in range(program.num_stages):
        start[s] = max((start[p] + costs.forward_s[p] + lag(p, s) for p in graph.producers[s]), default=0)
        down[s] = max((lag(p, s) + gradient[p] + down[p] for p in graph.producers[s]), default=0)
    for s in reversed(range(program.num_stages)):
        turn[s] = max([start[s] + costs.forward_s[s], *(turn[c] + gradient[c] + lag(s, c) for c in graph.consumers[s])])
    counts = program.visits.sum(axis=1).tolist()
    bounds: list[float] = [turn[s] + max(whole[s], gradient[s] + down[s]) for s, count in enumerate(counts) if count]
    for rank in range(program.num_ranks):
        held = [s for s in program.chunks(rank) if counts[s]]
        forwards = sum(counts[s] * costs.forward_s[s] for s in held)
        back = min((turn[s] for s in held), default=0)
        first = min((start[s] for s in held), default=0)
        before = min(forwards, back - first)
        bounds.append(back + forwards - before + sum(counts[s] * whole[s] for s in held))
        gradients = sum(counts[s] * gradient[s] for s in held)
        bounds.append(back + forwards - before + gradients + min((down[s] for s in held), default=0))
    return max(bounds, default=0)


def _check(costs: Costs, num_microbatches: int, placement: Placement) -> None:
    if not is_count(num_microbatches):
        raise ScheduleError(
            f"num_microbatches must be a whole number, at least 1; got {num_microbatches!r}; pass 1 or more"
        )
    if not all(is_count(rank, 0) for rank in placement):
        raise ScheduleError(
            f"ranks must be numbered from 0; got the placement {placement!r}; pass whole numbers, at least 0"
        )
    if len(placement) != costs.num_stages:
        raise ScheduleError(
            f"a placement must have one rank for each stage; the costs are for {counted(costs.num_stages, 'stage')}, "
            f"the placement is for {counted(len(placement), 'stage')}; make the numbers agree"
        )


def _limits(given: int | Sequence[int] | None, chunks: dict[int, int], num_microbatches: int) -> dict[int, int]:
    """Return the number of (stage, micro-batch) pairs that each rank can hold, keyed by rank.

    For each rank, this is the rank's limit or the total number of its pairs, whichever is smaller.
    """
    most = {rank: count * num_microbatches for rank, count in chunks.items()}
    if given is None:
        return most
    own = rank_limits(given, max(chunks) + 1)
    if len(own) <= max(chunks):
        raise ScheduleError(
            f"max_in_flight must be one number, or a list with one for each rank; got a list of "
            f"{counted(len(own), 'number')} for {counted(max(chunks) + 1, 'rank')}; pass one number, or a list of "
            f"{counted(max(chunks) + 1, 'number')}"
        )
    limits = {rank: own[rank] for rank in chunks}
    for rank, limit in limits.items():
        if limit < chunks[rank]:
            raise ScheduleError(
                f"a rank must have room for a micro-batch on each of its stages; rank {rank} has "
                f"{counted(chunks[rank], 'stage')}, but max_in_flight allows {limit}; pass {chunks[rank]} or more"
            )
    return {rank: min(limit, most[rank]) for rank, limit in limits.items()}


def _one_machine(chunks: Sequence[StageTimes], num_microbatches: int, limit: int) -> float:
    """Return the largest value of earliest start + work + shortest time to the end, over all parts of a rank's work."""
    release = min(stage.turn + stage.backward for stage in chunks)
    moments = {moment for s in chunks for moment in (s.start, s.turn, s.rest_start)} | {release}
    best: float = 0
    for moment in moments:
        parts = [(after, num_microbatches * seconds) for after, seconds in _parts_from(moment, chunks)]
        if moment <= release:
            parts += _held_back([s for s in chunks if s.start < moment], num_microbatches, limit)
        work: float = 0
        for after, seconds in sorted(parts, reverse=True):
            work += seconds
            best = max(best, moment + work + after)
    return best


def _parts_from(moment: float, chunks: Sequence[StageTimes]) -> Iterable[tuple[float, float]]:
    """Yield the parts of a micro-batch's work that cannot start before ``moment``, as (time to the end, duration)."""
    for stage in chunks:
        if stage.start >= moment:
            yield stage.after_forward, stage.forward
        if stage.turn >= moment:
            yield stage.after_gradient, stage.gradient
        if stage.rest_start >= moment:
            yield 0, stage.rest


def _held_back(chunks: Sequence[StageTimes], num_microbatches: int, limit: int) -> list[tuple[float, float]]:
    """Return the forwards that the limit forces to wait until a (stage, micro-batch) pair is released.

    The result is a list with a single tuple (shortest time to the end, total duration) for all these forwards together,
    or [] if no forward has to wait.
    """
    left: float = 0
    room = limit
    # The longest forwards fill the room, so that the remaining work is shortest.
    for stage in sorted(chunks, key=lambda stage: stage.forward, reverse=True):
        left += (num_microbatches - min(room, num_microbatches)) * stage.forward
        room -= min(room, num_microbatches)
    return [(min(stage.after_forward for stage in chunks), left)] if left else []


@dataclass(frozen=True, kw_only=True)
class _PathSegment:
    """A part of a micro-batch's path through a rank. Only ``places`` micro-batches can be in this part at once."""

    start: float  # earliest start
    seconds: float  # shortest duration
    places: int  # the maximum number of micro-batches in the segment at once
    forward: float  # duration of the F with which the segment starts
    after_forward: float  # from the end of that F to the end of all work that follows it
    last: float  # duration of the shortest action with which the segment ends
    after: float  # from the end of the segment to the end of all work that follows it


def _segments(chunks: Sequence[StageTimes], num_microbatches: int, limit: int) -> Iterator[_PathSegment]:
    """Yield the segments of a micro-batch's path through a rank that have room for only some of the micro-batches.

    Two chunks of the rank, ``first`` and a chunk ``second`` that comes later in the chain, have two segments: from the
    F on ``first`` to the gradient on ``second``, and from the F on ``second`` to the gradient on ``first``. A single
    chunk has one segment, from its F to its gradient.

    Throughout a segment, the micro-batch is in flight on every chunk up to ``first``. When its F on ``second`` starts,
    it is in flight on every chunk up to ``second``. So only a limited number of micro-batches can be in one segment.
    """
    for number, first in enumerate(chunks, 1):
        for following, second in enumerate(chunks[number - 1 :], number):
            places = (limit - following) // number + 1
            if places >= num_microbatches:
                continue
            ways = [(first, second), (second, first)] if first is not second else [(first, first)]
            for begin, end in ways:
                yield _PathSegment(
                    start=begin.start,
                    seconds=end.turn + end.gradient - begin.start,
                    places=places,
                    forward=begin.forward,
                    after_forward=begin.after_forward,
                    last=end.gradient,
                    after=end.down,
                )
            if number == 1:  # also from F on the second chunk until the first chunk releases the pair
                yield _PathSegment(
                    start=second.start,
                    seconds=first.turn + first.backward - second.start,
                    places=places,
                    forward=second.forward,
                    after_forward=second.after_forward,
                    last=first.release,
                    after=0,
                )


def _in_turns(segment: _PathSegment, num_microbatches: int) -> float:
    """Return the lower bound in seconds that follows from the limited number of places in a segment.

    Each F starts at least ``segment.seconds`` after the F that is ``segment.places`` micro-batches earlier. The
    remaining forwards run back to back.
    """
    rounds, left = divmod(num_microbatches - 1, segment.places)
    return segment.start + rounds * segment.seconds + (left + 1) * segment.forward + segment.after_forward


def _littles_law_of_segment(segment: _PathSegment, num_microbatches: int) -> float:
    """Return the bound in seconds from Little's law: at most ``places`` micro-batches are in the segment at once."""
    places = segment.places
    ramps = places * (places - 1) * (segment.forward + segment.last)
    return _ratio(
        2 * num_microbatches * segment.seconds + ramps + 2 * places * (segment.start + segment.after), 2 * places
    )


def _littles_law(chunks: Sequence[StageTimes], num_microbatches: int, limit: int) -> float:
    """Return a lower bound on the step, in seconds, if a rank holds at most ``limit`` (stage, micro-batch) pairs.

    Pairs start one after another and are released one after another. The result is the larger of two bounds. The first
    counts a pair as held until it is released. The second counts it only until its input gradient is computed, and
    adds the time of the backwards of earlier stages that must still follow.
    """
    start = min(stage.start for stage in chunks)
    lives = sum(stage.life for stage in chunks)
    until_gradient = sum(stage.life - stage.rest for stage in chunks)
    ramp_up = min(stage.forward for stage in chunks)
    ways = (
        (lives, min(stage.release for stage in chunks), 0),
        (until_gradient, min(stage.gradient for stage in chunks), min(stage.down for stage in chunks)),
    )
    return start + max(
        _ratio(num_microbatches * total, limit) + _ratio((limit - 1) * (ramp_up + ramp_down), 2) + after
        for total, ramp_down, after in ways
    )


def _ratio(seconds: Any, count: int) -> float:
    """Return ``seconds / count``, exact for whole numbers and Fractions."""
    quotient: Any = Fraction(seconds, count) if isinstance(seconds, Rational) else seconds / count
    return quotient  # type: ignore[no-any-return]  # mypy does not accept a Fraction as a float
