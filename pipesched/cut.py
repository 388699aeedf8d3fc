"""Cut: which calls of a captured forward each stage runs, and what the stages hand to each other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pipesched.capture import INPUT, Capture, Value

__all__ = ["Part", "cut_at"]


@dataclass
class Part:
    """One stage's part. runs: the calls it runs, its own and the free ones that it needs; inputs: the model's inputs.

    receives: from each earlier stage, what it takes; gives: to each later one. A value with several users goes from
    user to user, so that its gradient comes back as one running sum, the last user's first, as autograd adds it up.
    """

    own: frozenset[int]
    runs: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()
    receives: dict[int, list[Value]] = field(default_factory=dict)
    gives: dict[int, list[Value]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The last call that it runs for others."""
        return max(self.own)


def cut_at(capture: Capture, starts: Sequence[int]) -> list[Part]:
    """The parts that begin with these calls, the first with the first call."""
    free = capture.free
    ends = [*starts[1:], len(capture.calls)]
    parts = [
        Part(frozenset(index for index in range(start, end) if index not in free))
        for start, end in zip(starts, ends, strict=True)
    ]
    home = {index: stage for stage, part in enumerate(parts) for index in part.own}
    users: dict[Value, list[int]] = {}
    for stage, part in enumerate(parts):
        part.runs, part.inputs, taken = _needed(capture, part.own)
        if stage == len(parts) - 1:
            taken |= {value for value in capture.output if value[0] not in {*part.runs, *free, INPUT}}
        for value in sorted(taken):
            users.setdefault(value, []).append(stage)
    for value in sorted(users):
        way = [home[value[0]], *users[value]]
        for giver, taker in pairwise(way):
            parts[giver].gives.setdefault(taker, []).append(value)
            parts[taker].receives.setdefault(giver, []).append(value)
    return parts


def _needed(capture: Capture, own: frozenset[int]) -> tuple[frozenset[int], frozenset[int], set[Value]]:
    """(the calls to run, the model's inputs needed, what comes from other stages)."""
    free = capture.free
    runs: set[int] = set()
    inputs: set[int] = set()
    taken: set[Value] = set()
    last = max(own, default=INPUT)
    before = [call for call in capture.calls[: last + 1] if call.index in free]
    asked = [*own, *(call.index for call in before if call.reads or not call.takes)]
    while asked:
        index = asked.pop()
        if index in runs:
            continue
        runs.add(index)
        for value in capture.calls[index].takes:
            if value[0] == INPUT:
                inputs.add(value[1])
            elif value[0] in own or value[0] in free:
                asked.append(value[0])
            else:
                taken.add(value)
    taken |= {
        (call.index, 0) for call in capture.calls if call.reads and call.index not in free | own and call.index < last
    }
    return frozenset(runs), frozenset(inputs), taken
