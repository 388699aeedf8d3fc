"""Bound: a lower bound on the makespan. A search that reaches the bound stops.

Two bounds are computed for every rank, and the maximum over all ranks is used.

- One-machine bound (Carlier 1982): for any subset of a rank's actions, the makespan is at least the sum of their
  earliest start, their total time, and the shortest time from the last of them to the end of the step. The bound is the
  largest such sum.
- In-turns bound, if memory is limited: if a stage can hold n micro-batches, then after n forwards it must release a
  micro-batch before the next forward.
"""

from collections.abc import Sequence
from dataclasses import replace

from pipesched.program.search.problem import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, OrderProblem
from pipesched.program.search.stage_times import chain_times

__all__ = ["lower_bound", "ranks_that_must_fuse"]


def lower_bound(problem: OrderProblem) -> int:
    """Return a lower bound on the makespan of any orders."""
    stages = _Stages(problem)
    bounds = [stages.one_machine(chunks) for chunks in problem.chunks if chunks]
    for resource in problem.resources:
        for rank, chunks in enumerate(problem.chunks):
            bounds += [
                stages.in_turns(stage, resource.limits[rank], resource.takes[FORWARD][stage]) for stage in chunks
            ]
    return int(max(bounds))


def ranks_that_must_fuse(problem: OrderProblem, makespan: int) -> list[bool]:
    """Return, for each rank, whether it must run a B to finish within ``makespan``.

    This is the case if the rank's lower bound exceeds ``makespan`` when the rank runs an I and a W instead of each B.
    """
    times = list(problem.times)
    times[BACKWARD] = [
        [i + w for i, w in zip(*rows, strict=True)] for rows in zip(times[INPUT_GRAD], times[WEIGHT_GRAD], strict=True)
    ]
    stages = _Stages(replace(problem, times=times))
    return [bool(chunks) and stages.one_machine(chunks) > makespan for chunks in problem.chunks]


class _Stages:
    """The earliest starts and the shortest remaining times of the stages' actions, over all micro-batches."""

    def __init__(self, problem: OrderProblem) -> None:
        self._times = [[list(row) for row in rows] for rows in problem.times]
        self._count = problem.num_microbatches
        self._shortest = [[min(row) for row in rows] for rows in problem.times]
        there = [min(row) for row in problem.forward_lags]
        back = [min(row) for row in problem.backward_lags]
        self._stages = chain_times(self._shortest, there, back)

    def one_machine(self, chunks: tuple[int, ...]) -> float:
        """Return the one-machine bound of the rank that holds these stages."""
        parts = [part for stage in chunks for part in self._parts(stage)]
        best: float = 0
        for moment in {start for start, _, _ in parts}:
            work = 0
            for after, seconds in sorted(((a, w) for start, a, w in parts if start >= moment), reverse=True):
                work += seconds
                best = max(best, moment + work + after)
        return best

    def _parts(self, stage: int) -> list[tuple[float, float, int]]:
        """Return the parts of a stage's work: (earliest start, least time from its end to the step's end, duration)."""
        forwards, inputs, weights, backwards = (rows[stage] for rows in self._times)
        gradients = rests = 0
        apart = all(i + w <= b for i, w, b in zip(inputs, weights, backwards, strict=True))
        for i, w, b in zip(inputs, weights, backwards, strict=True):
            gradients += min(i, b)
            rests += min(b, i + w) - min(i, b)
        own = self._stages[stage]
        _, least_input, least_weight, _ = (row[stage] for row in self._shortest)
        after_gradient = max(least_weight, own.down) if apart else own.down
        return [
            (own.start, own.after_forward, sum(forwards)),
            (own.turn, after_gradient, gradients),
            (own.turn + (least_input if apart else 0), 0, rests),
        ]

    def in_turns(self, stage: int, limit: int, takes: Sequence[int]) -> float:
        """Return the in-turns bound of a stage; 0 if the stage can hold all micro-batches."""
        room = limit // max(1, min(takes))
        if not 0 < room < self._count:
            return 0
        rounds, left = divmod(self._count - 1, room)
        own = self._stages[stage]
        return own.start + rounds * own.life + (left + 1) * own.forward + own.after_forward
