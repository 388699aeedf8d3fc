"""Bound: a lower bound on the makespan. A search that reaches the bound stops.

The bound is the largest of two kinds of bounds over all ranks. The one-machine bound (Carlier 1982) is the earliest
start + work + shortest time to the end, for any part of the rank's work. The in-turns bound is for limited memory: if a
stage can hold n micro-batches, the next forward after n forwards waits until one of these micro-batches is released.
"""

from collections.abc import Sequence

from pipesched.program.search.problem import FORWARD, Problem

__all__ = ["lower_bound"]


def lower_bound(problem: Problem) -> int:
    """Return a lower bound on the makespan of all orders."""
    stages = _Stages(problem)
    bounds = [stages.one_machine(chunks) for chunks in problem.chunks if chunks]
    for resource in problem.resources:
        for rank, chunks in enumerate(problem.chunks):
            bounds += [
                stages.in_turns(stage, resource.limits[rank], resource.takes[FORWARD][stage]) for stage in chunks
            ]
    return max(bounds)


class _Stages:
    """The earliest starts and the shortest remaining times of the stages' actions, over all micro-batches."""

    def __init__(self, problem: Problem) -> None:
        self._times = [[list(row) for row in rows] for rows in problem.times]
        self._count = problem.num_microbatches
        forward, inputs, weights, backward = ([min(row) for row in rows] for rows in problem.times)
        there = [min(row) for row in problem.forward_lags]
        back = [min(row) for row in problem.backward_lags]
        num_stages = problem.num_stages
        gradient = [min(i, b) for i, b in zip(inputs, backward, strict=True)]
        start, down, ends = [0], [0], []
        for s in range(num_stages):
            ends.append(min(inputs[s] + max(weights[s], down[s]), backward[s] + down[s]))
            if s + 1 < num_stages:
                start.append(start[s] + forward[s] + there[s])
                down.append(back[s] + ends[s])
        turn = [start[-1] + forward[-1]]
        after = [ends[-1]]
        for s in reversed(range(num_stages - 1)):
            turn.insert(0, turn[0] + gradient[s + 1] + back[s])
            after.insert(0, there[s] + forward[s + 1] + after[0])
        self._forward, self._gradient = forward, gradient
        self._inputs, self._weights, self._backward = inputs, weights, backward
        self._start, self._turn, self._down, self._after = start, turn, down, after

    def one_machine(self, chunks: tuple[int, ...]) -> int:
        """Return the one-machine bound of the rank that holds these stages."""
        tasks = [task for stage in chunks for task in self._tasks(stage)]
        best = 0
        for moment in {start for start, _, _ in tasks}:
            work = 0
            for after, seconds in sorted(((a, w) for start, a, w in tasks if start >= moment), reverse=True):
                work += seconds
                best = max(best, moment + work + after)
        return best

    def _tasks(self, stage: int) -> list[tuple[int, int, int]]:
        """Return a stage's work as (earliest start, shortest time to the end, duration)."""
        forwards, inputs, weights, backwards = (rows[stage] for rows in self._times)
        gradients = rests = 0
        apart = all(i + w <= b for i, w, b in zip(inputs, weights, backwards, strict=True))
        for i, w, b in zip(inputs, weights, backwards, strict=True):
            gradients += min(i, b)
            rests += min(b, i + w) - min(i, b)
        turn = self._turn[stage]
        after_gradient = max(self._weights[stage], self._down[stage]) if apart else self._down[stage]
        return [
            (self._start[stage], self._after[stage], sum(forwards)),
            (turn, after_gradient, gradients),
            (turn + (self._inputs[stage] if apart else 0), 0, rests),
        ]

    def in_turns(self, stage: int, limit: int, takes: Sequence[int]) -> int:
        """Return the in-turns bound of a stage; 0 if the stage can hold all micro-batches."""
        room = limit // max(1, min(takes))
        if not 0 < room < self._count:
            return 0
        rounds, left = divmod(self._count - 1, room)
        whole = min(self._inputs[stage] + self._weights[stage], self._backward[stage])
        life = self._turn[stage] - self._start[stage] + whole
        return self._start[stage] + rounds * life + (left + 1) * self._forward[stage] + self._after[stage]
