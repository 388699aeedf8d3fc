"""Bounds: the time below which no schedule can get, whatever its order. How far a schedule is from the best there is.

Three arguments, each for the rank where it gives most; the relaxations that zero-bubble scheduling rests on
(Qi et al. 2023, arXiv:2401.10241), written for any placement:

one machine  what a rank does cannot start before it has come down the chain, and what follows it takes its own time:
             earliest start + work + shortest way to the end, for any part of the rank's work (Carlier 1982)
in turns     of a stage held n times at once, F number n + 1 waits for the end of one that started before
Little's law pairs in flight = rate x life, so that many long lives take long under a limit
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from numbers import Rational
from typing import Any

from pipesched.checks import as_list, is_count
from pipesched.errors import ScheduleError
from pipesched.program.liveness import rank_limits
from pipesched.program.placement import Placement
from pipesched.program.program import Program
from pipesched.simulation.costs import Costs, check_costs

__all__ = ["lower_bound", "program_bound"]


def lower_bound(
    costs: Costs,
    num_microbatches: int,
    *,
    placement: Placement | None = None,
    max_in_flight: int | Sequence[int] | None = None,
    split: bool = True,
) -> float:
    """The makespan in seconds that no valid program of a chain of stages with these costs can beat.

    placement: stage -> rank; a rank for each stage unless given. max_in_flight: at most so many (stage, micro-batch)
    pairs held at once from their F on, one number or one a rank; no limit unless given. (A recomputed pair counts from
    its R only: bound programs with recompute without a limit.) split: a backward may be one B or an I and a W,
    whatever is shorter, also in one program; False: each is a B.

    Whole numbers and Fractions stay exact; floats hold up to their rounding. Any schedule may be above it: the best
    one is not known in general (the problem is NP-hard). Raises ScheduleError for a placement, a limit or a number of
    micro-batches that does not fit.
    """
    check_costs(costs)
    rule = "a placement is a list with a rank for each stage"
    ranks_of = range(costs.num_stages) if placement is None else as_list(placement, rule, "pass such as (0, 1, 0, 1)")
    placement = tuple(ranks_of)
    _check(costs, num_microbatches, placement)
    if costs.overlap < 1:  # all that a pair which overlaps may gain
        costs = costs.scaled(costs.overlap)
    stages = _stages(costs, placement, split)
    ranks = sorted(set(placement))
    held = {rank: [stage for stage, holder in zip(stages, placement, strict=True) if holder == rank] for rank in ranks}
    limits = _limits(max_in_flight, {rank: len(chunks) for rank, chunks in held.items()}, num_microbatches)
    bounds: list[float] = []
    for rank, chunks in held.items():
        limit = limits[rank]
        bounds.append(_one_machine(chunks, num_microbatches, limit))
        if limit < num_microbatches * len(chunks):
            bounds += [_in_turns(stage, num_microbatches, limit) for stage in chunks]
            bounds += [_littles_law(chunks, num_microbatches, limit)]
    return max(bounds, default=0)


def program_bound(program: Program, costs: Costs) -> float | None:
    """The bound for all programs of this one's shape, backwards whole or split; None for a forward-only one.

    Where the stages are no chain, or several, it is a weaker one.
    """
    if program.forward_only:
        return None
    if program.is_chain:
        return lower_bound(costs, program.num_microbatches, placement=program.placement)
    return _of_graph(program, costs if costs.overlap >= 1 else costs.scaled(costs.overlap))


def _of_graph(program: Program, costs: Costs) -> float:
    """For any stage graph, and micro-batches that visit some of its stages: work between the ways in and out.

    Of a rank's work the forwards alone can run before the first gradient can come, and behind the last gradient the
    stages before it follow.
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
            f"a bound is for a whole number of micro-batches, at least 1; got {num_microbatches!r}; pass 1 or more"
        )
    if not all(is_count(rank, 0) for rank in placement):
        raise ScheduleError(f"ranks are counted from 0; got a placement {placement!r}; pass whole numbers from 0 on")
    if len(placement) != costs.num_stages:
        raise ScheduleError(
            f"a placement names a rank for each stage; the costs have {costs.num_stages} stages, the placement "
            f"{len(placement)}; make them agree"
        )


def _limits(given: int | Sequence[int] | None, chunks: dict[int, int], num_microbatches: int) -> dict[int, int]:
    """The most pairs each rank may hold: never more than it has."""
    most = {rank: count * num_microbatches for rank, count in chunks.items()}
    if given is None:
        return most
    own = rank_limits(given, max(chunks) + 1)
    if len(own) <= max(chunks):
        raise ScheduleError(
            f"max_in_flight is one number or one a rank; got {len(own)} for ranks up to {max(chunks)}; pass as many"
        )
    limits = {rank: own[rank] for rank in chunks}
    for rank, limit in limits.items():
        if limit < chunks[rank]:
            raise ScheduleError(
                f"a rank holds a micro-batch on each of its stages before the first one is done; rank {rank} has "
                f"{chunks[rank]} stages, max_in_flight allows {limit}; no program exists: allow {chunks[rank]} or more"
            )
    return {rank: min(limit, most[rank]) for rank, limit in limits.items()}


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What one micro-batch needs on one stage, in seconds: times, earliest starts, and what must follow at least.

    A backward is ``gradient``, for which the stage below waits, and ``rest``, which nobody waits for.
    """

    forward: float
    gradient: float
    rest: float
    start: float  # earliest start of F
    turn: float  # earliest start of the gradient
    rest_start: float
    after_forward: float  # from the end of F to the end of all that follows
    after_gradient: float
    down: float  # from the end of the gradient to the end of what follows on the stages below
    release: float  # the shortest action that ends a pair

    @property
    def backward(self) -> float:
        """The least time that the whole backward takes."""
        return self.gradient + self.rest

    @property
    def life(self) -> float:
        """The least time from the start of F until the pair is no longer held."""
        return self.turn - self.start + self.backward


def _stages(costs: Costs, placement: Placement, split: bool) -> list[_Stage]:
    """Walk one micro-batch down the chain and back, each time the quickest way."""
    count = costs.num_stages
    way = [costs.transfer_s if a != b else 0 for a, b in pairwise(placement)]
    forward = costs.forward_s
    whole = costs.backward_s
    inputs, weights = (costs.input_grad_s, costs.weight_grad_s) if split else (whole, (0,) * count)
    gradient = [min(i, b) for i, b in zip(inputs, whole, strict=True)]
    start: list[float] = [0]
    down: list[float] = [0]
    ends: list[float] = []  # from the start of a stage's gradient to the end of all that follows
    for s in range(count):
        ends.append(min(inputs[s] + max(weights[s], down[s]), whole[s] + down[s]))
        if s + 1 < count:
            start.append(start[s] + forward[s] + way[s])
            down.append(way[s] + ends[s])
    turn = [start[-1] + forward[-1]]
    after = [ends[-1]]
    for s in reversed(range(count - 1)):
        turn.append(turn[-1] + gradient[s + 1] + way[s])
        after.append(way[s] + forward[s + 1] + after[-1])
    turn.reverse()
    after.reverse()
    found = []
    for s in range(count):
        apart = inputs[s] + weights[s] <= whole[s]  # a B is then no gain over an I and a W in a row
        found.append(
            _Stage(
                forward=forward[s],
                gradient=gradient[s],
                rest=min(whole[s], inputs[s] + weights[s]) - gradient[s],
                start=start[s],
                turn=turn[s],
                rest_start=turn[s] + (inputs[s] if apart else 0),
                after_forward=after[s],
                after_gradient=max(weights[s], down[s]) if apart else down[s],
                down=down[s],
                release=min(whole[s], weights[s]) if split else whole[s],
            )
        )
    return found


def _one_machine(chunks: Sequence[_Stage], num_microbatches: int, limit: int) -> float:
    """The best of: earliest start + work + shortest way to the end, over all parts of a rank's work."""
    release = min(stage.turn + stage.backward for stage in chunks)
    moments = {moment for s in chunks for moment in (s.start, s.turn, s.rest_start)} | {release}
    best: float = 0
    for moment in moments:
        tasks = [(after, num_microbatches * seconds) for after, seconds in _tasks_from(moment, chunks)]
        if moment <= release:
            tasks += _held_back([s for s in chunks if s.start < moment], num_microbatches, limit)
        work: float = 0
        for after, seconds in sorted(tasks, reverse=True):
            work += seconds
            best = max(best, moment + work + after)
    return best


def _tasks_from(moment: float, chunks: Sequence[_Stage]) -> Iterable[tuple[float, float]]:
    """What of one micro-batch cannot start before a moment: (time that must follow it, its own time)."""
    for stage in chunks:
        if stage.start >= moment:
            yield stage.after_forward, stage.forward
        if stage.turn >= moment:
            yield stage.after_gradient, stage.gradient
        if stage.rest_start >= moment:
            yield 0, stage.rest


def _held_back(chunks: Sequence[_Stage], num_microbatches: int, limit: int) -> list[tuple[float, float]]:
    """The forwards of these stages that must wait until a pair is released: the limit has no room for them before."""
    left: float = 0
    room = limit
    for stage in sorted(chunks, key=lambda stage: stage.forward, reverse=True):  # the longest first: least is left
        left += (num_microbatches - min(room, num_microbatches)) * stage.forward
        room -= min(room, num_microbatches)
    return [(min(stage.after_forward for stage in chunks), left)] if left else []


def _in_turns(stage: _Stage, num_microbatches: int, limit: int) -> float:
    """F number 1 + limit starts a life after F number 1, and so on; the F that are left follow in a row."""
    rounds, left = divmod(num_microbatches - 1, limit)
    return stage.start + rounds * stage.life + (left + 1) * stage.forward + stage.after_forward


def _littles_law(chunks: Sequence[_Stage], num_microbatches: int, limit: int) -> float:
    """All lives laid side by side, at most ``limit`` at once; F start and pairs end one by one.

    Once with lives up to the end of the pair, and once up to its gradient, after which the stages below follow.
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
    """A quotient that stays exact where the time is."""
    quotient: Any = Fraction(seconds) / count if isinstance(seconds, Rational) else seconds / count
    return quotient  # type: ignore[no-any-return]  # a Fraction serves as a float, but is no kind of one
