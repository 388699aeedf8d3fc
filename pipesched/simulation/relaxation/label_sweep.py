"""Label sweep: searches through all orders of one rank's work, to prove that no order meets a deadline.

The search models the time and the memory of this rank. The work of other ranks only delays the inputs of its actions.
A state contains, for each chunk, how many forwards, input gradients and weight gradients are done. The state's label
holds the time and, for each micro-batch in progress, the time at which the input of its next action arrives. If several
orders lead to the same state, the componentwise minimum of their labels is kept. The result is still a lower bound,
because an action that starts earlier never ends later.

A state is dropped if the rest of the step cannot end before the deadline. If no states remain, no program ends before
the deadline. The search handles all ranks and several deadlines at once, as rows of arrays.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["RankTimes", "Sweep", "Swept"]

_Ints = NDArray[np.int64]

_LARGEST_KEY = 2**62


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """The times of one rank's work on a micro-batch, as multiples of a time unit. Tuples have one entry per chunk."""

    forward: tuple[int, ...]
    #: Without split backwards, equal to ``backward``.
    input_grad: tuple[int, ...]
    weight_grad: tuple[int, ...]
    backward: tuple[int, ...]
    #: Earliest start of the first F.
    start: int
    #: Shortest time between the arrivals of two micro-batches at the first chunk.
    arrival_interval: int
    #: From the end of F to the start of F on the next chunk; for the last chunk, to the start of the gradient.
    forward_lag: tuple[int, ...]
    #: Shortest time between the arrivals of two gradients at the last chunk.
    return_interval: int
    #: From the end of the gradient to the start of the gradient on the previous chunk; 0 for the first chunk.
    backward_lag: tuple[int, ...]
    #: From the end of F to the end of all work that follows it.
    after_forward: tuple[int, ...]
    #: From the end of the gradient to the end of the work of earlier stages that follows it.
    after_gradient: tuple[int, ...]
    #: The maximum number of (stage, micro-batch) pairs held at once.
    limit: int


class Swept(NamedTuple):
    """The result of a sweep."""

    #: The deadlines that no program meets.
    missed: tuple[int, ...]
    #: The deadlines for which labels are left. () if the effort was used up before the end.
    kept: tuple[int, ...]
    #: The effort that is left.
    effort: int


class _States:
    """States as rows of arrays: each has a problem (a rank and a deadline), counts of actions, and a label."""

    def __init__(self, problem: _Ints, counts: _Ints, labels: _Ints) -> None:
        self.problem = problem
        #: For each chunk, the counts of F and of gradients that are done, and of W that can run but are not done.
        self.counts = counts
        #: The time, the last arrival of a gradient, and the arrivals of micro-batches (by number modulo the limit).
        self.labels = labels

    def __len__(self) -> int:
        return len(self.problem)

    def __getitem__(self, rows: NDArray[np.bool_] | _Ints) -> "_States":
        return _States(self.problem[rows], self.counts[rows], self.labels[rows])

    @classmethod
    def merged(cls, parts: "Sequence[_States]", digits: _Ints) -> "_States":
        """Concatenate states. Equal states become one state, with the componentwise minimum of their labels."""
        if not parts:
            return cls(np.zeros(0, np.int64), np.zeros((0, len(digits) - 1), np.int64), np.zeros((0, 2), np.int64))
        problem = np.concatenate([part.problem for part in parts])
        counts = np.concatenate([part.counts for part in parts])
        labels = np.concatenate([part.labels for part in parts])
        keys = counts @ digits[:-1] + problem * digits[-1]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        firsts = np.flatnonzero(np.diff(keys, prepend=-1))
        if not len(firsts):
            return cls(problem, counts, labels)
        return cls(problem[order][firsts], counts[order][firsts], np.minimum.reduceat(labels[order], firsts, axis=0))


class Sweep:
    """Searches the orders of several ranks for several deadlines at once.

    States are processed in ascending order of the number of completed actions.
    """

    def __init__(
        self, ranks: Sequence[RankTimes], num_microbatches: int, deadlines: Sequence[int], split: bool
    ) -> None:
        self._deadlines = deadlines
        self._microbatches = num_microbatches
        self._num_ranks = len(ranks)
        self._chunks = len(ranks[0].forward)
        self._split = split
        problems = [(rank, deadline) for deadline in deadlines for rank in ranks]
        column = {name: np.array([getattr(rank, name) for rank, _ in problems], np.int64) for name in _COLUMNS}
        self._times = column
        self._deadline = np.array([deadline for _, deadline in problems], np.int64)
        self._gradient = np.minimum(column["input_grad"], column["backward"])
        self._whole = np.minimum(column["input_grad"] + column["weight_grad"], column["backward"])
        self._tail = column["after_gradient"].min(axis=1)
        self._width = min(num_microbatches, int(column["limit"].max(initial=1)))
        self._num_actions = 3 * self._chunks * num_microbatches
        self._waiting: dict[int, list[_States]] = {}

    def run(self, effort: int) -> Swept:
        """Search through the orders of all ranks. Stop early if ``effort`` is used up."""
        count = len(self._deadline)
        digits = [(self._microbatches + 1) ** k for k in range(3 * self._chunks + 1)]
        if digits[-1] * count > _LARGEST_KEY:
            return Swept((), (), 0)
        labels = np.zeros((count, 2 + self._width), np.int64)
        self._waiting = {0: [_States(np.arange(count), np.zeros((count, 3 * self._chunks), np.int64), labels)]}
        for level in range(self._num_actions):
            states = self._unmissed(_States.merged(self._waiting.pop(level, []), np.array(digits, np.int64)), level)
            effort -= states.labels.size
            if effort <= 0:
                self._waiting[level] = [states]
                return Swept(self._missed(), (), 0)
            for taken, following in self._following(states):
                if len(following):
                    self._waiting.setdefault(level + taken, []).append(following)
        missed = self._missed()
        return Swept(missed, tuple(deadline for deadline in self._deadlines if deadline not in missed), effort)

    def _unmissed(self, states: _States, level: int) -> _States:
        """Return the states for deadlines that every rank may still meet."""
        waiting = [states, *self._waiting.get(level + 1, [])]
        return states[self._kept(waiting)[states.problem // self._num_ranks]]

    def _kept(self, states: Iterable[_States]) -> NDArray[np.bool_]:
        """Return, for each deadline, whether every rank has at least one of these states."""
        alive = np.zeros(len(self._deadline), np.bool_)
        for each in states:
            alive[each.problem] = True
        return np.asarray(alive.reshape(-1, self._num_ranks).all(axis=1))

    def _missed(self) -> tuple[int, ...]:
        """Return the deadlines that some rank is certain to miss, because no states of that rank remain."""
        kept = self._kept(chain.from_iterable(self._waiting.values())).tolist()
        return tuple(deadline for deadline, keeps in zip(self._deadlines, kept, strict=True) if not keeps)

    def _following(self, states: _States) -> Iterator[tuple[int, _States]]:
        """Yield (number of actions, states after them) for each possible next action. A full backward counts as two."""
        for chunk in range(self._chunks):
            yield 1, self._after_forward(states, chunk)
            yield 2, self._after_gradient(states, chunk, whole=True)
            if self._split:
                yield 1, self._after_gradient(states, chunk, whole=False)
                yield 1, self._after_weight_grad(states, chunk)

    def _after_forward(self, states: _States, chunk: int) -> _States:
        chunks = self._chunks
        times = self._times
        forwards, gradients, owed = np.split(states.counts, 3, axis=1)
        held = (forwards - gradients + owed).sum(axis=1)
        ready = forwards[:, chunk - 1] if chunk else self._microbatches
        states = states[(forwards[:, chunk] < ready) & (held < times["limit"][states.problem])]
        problem = states.problem
        number = states.counts[:, chunk]
        rows = np.arange(len(states))
        slot = 2 + number % self._width
        if chunk:
            arrival = states.labels[rows, slot]
        else:
            arrival = times["start"][problem] + number * times["arrival_interval"][problem]
        ends = np.maximum(states.labels[:, 0], arrival) + times["forward"][problem, chunk]
        states.counts[:, chunk] += 1
        states.labels[:, 0] = ends
        following = ends + times["forward_lag"][problem, chunk]
        if chunk == chunks - 1:
            following = np.maximum(following, states.labels[:, 1] + times["return_interval"][problem])
            states.labels[:, 1] = following
        states.labels[rows, slot] = following
        return self._in_time(states, ends + times["after_forward"][problem, chunk])

    def _after_gradient(self, states: _States, chunk: int, *, whole: bool) -> _States:
        chunks = self._chunks
        times = self._times
        last = chunk == chunks - 1
        done = chunks + chunk
        states = states[states.counts[:, done] < states.counts[:, chunk if last else done + 1]]
        problem = states.problem
        rows = np.arange(len(states))
        slot = 2 + states.counts[:, done] % self._width
        seconds = times["backward" if whole else "input_grad"][problem, chunk]
        ends = np.maximum(states.labels[:, 0], states.labels[rows, slot]) + seconds
        states.counts[:, done] += 1
        if not whole:
            states.counts[:, chunks + done] += 1
        states.labels[:, 0] = ends
        states.labels[rows, slot] = ends + times["backward_lag"][problem, chunk]
        return self._in_time(states, ends + times["after_gradient"][problem, chunk])

    def _after_weight_grad(self, states: _States, chunk: int) -> _States:
        owed = 2 * self._chunks + chunk
        states = states[states.counts[:, owed] > 0]
        states.counts[:, owed] -= 1
        states.labels[:, 0] += self._times["weight_grad"][states.problem, chunk]
        return self._in_time(states, states.labels[:, 0])

    def _in_time(self, states: _States, least: _Ints) -> _States:
        """Return the states from which the step can end before the deadline.

        Args:
            states: the states after an action.
            least: for each state, a time before which the step cannot end.

        """
        problem = states.problem
        now = states.labels[:, 0]
        forwards, gradients, owed = np.split(states.counts, 3, axis=1)
        left = self._microbatches - gradients
        to_come = now + ((self._microbatches - forwards) * self._times["forward"][problem]).sum(axis=1)
        work = (left * self._whole[problem] + owed * self._times["weight_grad"][problem]).sum(axis=1)
        way_back = (left * self._gradient[problem]).sum(axis=1) + np.where(left.any(axis=1), self._tail[problem], 0)
        least = np.maximum(least, to_come + np.maximum(work, way_back))
        return states[least < self._deadline[problem]]


_COLUMNS = tuple(RankTimes.__annotations__)
