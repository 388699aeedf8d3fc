"""Stage parts: the calls of a captured forward that each stage runs, and the values that stages send to each other."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pipesched.capture.capture import INPUT, Call, Capture, Value

__all__ = ["Homes", "StagePart", "cut_at"]


@dataclass
class StagePart:
    """The calls of a captured forward that one stage runs, and the values that this stage exchanges with other stages.

    If several stages use a value, each of these stages sends the value on to the next stage that uses it. The gradient
    is sent back along the same path. Each stage adds its contribution to the sum that it receives, so the order of the
    additions is the same as in autograd.
    """

    #: The calls that belong to this stage.
    own: frozenset[int]
    #: The calls in ``own``, and the free calls (see ``Capture.free``) that this stage repeats.
    runs: frozenset[int] = frozenset()
    #: Names of the model's inputs that this stage needs, without indices in lists.
    inputs: frozenset[Any] = frozenset()
    #: Earlier stage -> the values that this stage receives from the earlier stage.
    receives: dict[int, list[Value]] = field(default_factory=dict)
    #: Later stage -> the values that this stage sends to the later stage.
    gives: dict[int, list[Value]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The index of the last call that belongs to this stage; -1 for a stage without calls, which runs no code."""
        return max(self.own, default=-1)


@dataclass(frozen=True, kw_only=True)
class Homes:
    """The stages that use the model's parameters and buffers, which hold for all batches."""

    #: Key of a call on the path that decides the cuts -> the stage that makes the call.
    calls: Mapping[Any, int]
    #: Name of a tensor -> the stages that may use it.
    stages: Mapping[str, Collection[int]]

    @classmethod
    def of(cls, capture: Capture, parts: Sequence[StagePart], stages: Mapping[str, Collection[int]]) -> "Homes":
        own = {_key(capture.calls[index]): stage for stage, part in enumerate(parts) for index in part.own}
        return cls(calls=own, stages=stages)

    def stages_of(self, call: Call) -> Collection[int]:
        """Return the stages that may make a call, which uses weights or buffers."""
        stages = set.intersection(*({*self.stages.get(name, ())} for name in call.uses))
        return stages | {self.calls[_key(call)]} if _key(call) in self.calls else stages

    def fitting(self, capture: Capture, candidates: Sequence[int], stage: int) -> Sequence[int]:
        """Return the candidates for the first call of a stage with which calls around it are in their own stages."""
        between = capture.calls[candidates[0] : candidates[-1]]
        homes = {call.index: self.stages_of(call) for call in between if call.weights}
        earliest = max((index + 1 for index, own in homes.items() if own and max(own) < stage), default=0)
        latest = min((index for index, own in homes.items() if own and min(own) >= stage), default=candidates[-1])
        return [at for at in candidates if earliest <= at <= latest] or candidates


def _key(call: Call) -> Any:
    return call.place, call.layer or call.uses


def cut_at(
    capture: Capture, starts: Sequence[int], edges: Collection[tuple[int, int]] | None = None
) -> list[StagePart]:
    """Return one Part per stage. ``starts`` holds the index of each stage's first call; ``starts[0]`` must be 0.

    With ``edges``, stages send values along these pairs of stages only. If two stages are not such a pair, the stages
    between them pass the value on.
    """
    free = capture.free
    ends = [*starts[1:], len(capture.calls)]
    parts = [
        StagePart(frozenset(index for index in range(start, end) if index not in free))
        for start, end in zip(starts, ends, strict=True)
    ]
    home = {index: stage for stage, part in enumerate(parts) for index in part.own}
    users: dict[Value, list[int]] = {}
    for stage, part in enumerate(parts):
        part.runs, part.inputs, taken = _needed(capture, part.own, last=stage == len(parts) - 1)
        for value in sorted(taken):
            users.setdefault(value, []).append(stage)
    for value in sorted(users):
        way = [home[value[0]], *users[value]]
        for giver, taker in _legs(way, edges):
            parts[giver].gives.setdefault(taker, []).append(value)
            parts[taker].receives.setdefault(giver, []).append(value)
    return parts


def _legs(way: Sequence[int], edges: Collection[tuple[int, int]] | None) -> Iterator[tuple[int, int]]:
    for giver, taker in pairwise(way):
        if edges is None or (giver, taker) in edges:
            yield giver, taker
        else:
            yield from pairwise(range(giver, taker + 1))


def _needed(capture: Capture, own: frozenset[int], *, last: bool) -> tuple[frozenset[int], frozenset[Any], set[Value]]:
    """Return the calls that a stage runs, and the model inputs and values of other stages that these calls need."""
    free = capture.free
    runs: set[int] = set()
    inputs: set[Any] = set()
    taken: set[Value] = set()
    end = len(capture.calls) if last else max(own, default=INPUT) + 1
    before = [call for call in capture.calls[:end] if call.index in free]
    looked_at = {index for index, _ in capture.looked_at}  # the shapes of free calls' values are not sent
    seen = {call.index for call in before if call.reads or call.transform or call.index in looked_at}
    seen |= {call.index for call in before if call.pattern.is_list and call.index > capture.first_read}
    asked = [*own, *(call.index for call in before if call.index in seen or not call.takes)]
    values = list(capture.output) if last else []
    while asked or values:
        if not values:
            index = asked.pop()
            values += () if index in runs else capture.calls[index].takes
            runs.add(index)
            continue
        giver, which = value = values.pop()
        if giver == INPUT:
            inputs.add(which[:2] if isinstance(which, tuple) else which)
        elif giver in own or giver in free:
            asked.append(giver)
            asked += (index for index in capture.free_writes.get(value, ()) if index < end)
        else:
            taken.add(value)
    taken |= {(call.index, 0) for call in capture.calls[:end] if call.reads and call.index not in free | own}
    return frozenset(runs), frozenset(inputs), taken
