"""Actions: what one rank does at one moment, and the table of kinds.

An action has a text form that is used everywhere (programs, errors, traces, pictures): ``2F0`` is the
forward of stage 2 for micro-batch 0, ``0SEND_F3>1`` sends its output 3 from stage 0 to stage 1, and
``1RECV_F3<0`` is the other end of it. ``str`` and ``Action.parse`` are inverses.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from pipesched.checks import shown
from pipesched.errors import ScheduleError

__all__ = ["KINDS", "OTHER_END", "Action", "Holding", "Kind", "Lane"]


class Lane(StrEnum):
    """The resource of a rank that an action occupies. Only compute counts for the bubble."""

    COMPUTE = "compute"
    COPY = "copy"


class Kind(StrEnum):
    """What an action does. ``str(kind)`` is its text form."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients
    I = "I"  # noqa: E741  input gradients only
    W = "W"  # weight gradients, after I
    R = "R"  # recompute the activations that a checkpointed F dropped
    UPDATE = "UPDATE"  # the optimizer's step on a stage's weights; its number counts the stage's updates
    SEND_F = "SEND_F"  # a stage's output, to a consumer
    RECV_F = "RECV_F"  # a stage's input, from a producer
    SEND_B = "SEND_B"  # the gradient of a stage's input, to its producer
    RECV_B = "RECV_B"  # the gradient of a stage's output, from a consumer
    OFFLOAD = "OFFLOAD"  # copy activations to the host, beside what is computed
    FREE = "FREE"  # wait for that copy, and give their memory back
    FETCH = "FETCH"  # bring them back, beside what is computed


class Holding(StrEnum):
    """What a rank holds in memory for one (stage, micro-batch) pair."""

    INPUT = "input"  # the stage's input, all that a checkpointed forward keeps
    ACTIVATIONS = "activations"  # what the backward needs
    OFFLOADED = "offloaded"  # the part of it that waits on the host between FREE and FETCH
    WEIGHT_GRAD = "weight_grad"  # what W needs, between I and W
    WEIGHTS = "weights"  # an older version of a stage's weights, which micro-batches in flight still use


class _KindRow(NamedTuple):
    """One row of the table of kinds: the lane, the memory it takes when it starts and gives back at its end."""

    lane: Lane
    takes: Holding | None = None
    gives: tuple[Holding, ...] = ()


_EVERYTHING = (Holding.INPUT, Holding.ACTIVATIONS, Holding.WEIGHT_GRAD)

#: The table of kinds. F takes INPUT instead of ACTIVATIONS where the program has an R for its pair. UPDATE takes
#: WEIGHTS where the version before it is still in use, until its last use.
KINDS: dict[Kind, _KindRow] = {
    Kind.F: _KindRow(Lane.COMPUTE, takes=Holding.ACTIVATIONS),
    Kind.B: _KindRow(Lane.COMPUTE, gives=_EVERYTHING),
    Kind.I: _KindRow(Lane.COMPUTE, takes=Holding.WEIGHT_GRAD, gives=(Holding.INPUT, Holding.ACTIVATIONS)),
    Kind.W: _KindRow(Lane.COMPUTE, gives=_EVERYTHING),
    Kind.R: _KindRow(Lane.COMPUTE, takes=Holding.ACTIVATIONS, gives=(Holding.INPUT,)),
    Kind.UPDATE: _KindRow(Lane.COMPUTE, takes=Holding.WEIGHTS),
    Kind.SEND_F: _KindRow(Lane.COPY),
    Kind.RECV_F: _KindRow(Lane.COPY),
    Kind.SEND_B: _KindRow(Lane.COPY),
    Kind.RECV_B: _KindRow(Lane.COPY),
    Kind.OFFLOAD: _KindRow(Lane.COPY),
    Kind.FREE: _KindRow(Lane.COPY, gives=(Holding.OFFLOADED,)),
    Kind.FETCH: _KindRow(Lane.COPY, takes=Holding.OFFLOADED),
}

#: The kind at the other end of a transfer, both ways.
OTHER_END: dict[Kind, Kind] = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_F: Kind.SEND_F,
    Kind.RECV_B: Kind.SEND_B,
}

_ARROWS = {Kind.SEND_F: ">", Kind.SEND_B: ">", Kind.RECV_F: "<", Kind.RECV_B: "<"}
_TEXT = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{1,9})(?:([<>])([0-9]{1,9}))?")


class Action(NamedTuple):
    """One thing that the rank holding ``stage`` does for ``microbatch``; ``peer`` is the stage at the other end."""

    stage: int
    kind: Kind
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        end = "" if self.peer is None else f"{_ARROWS.get(self.kind, '>')}{self.peer}"
        return f"{self.stage}{self.kind.value}{self.microbatch}{end}"

    @property
    def lane(self) -> Lane:
        """The lane that the action occupies."""
        return KINDS[self.kind].lane

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the text form. Raises ScheduleError naming what is wrong."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[2] not in Kind.__members__:
            kinds = ", ".join(Kind)
            raise ScheduleError(
                f"an action is <stage><kind><micro-batch>, such as 2F0; got {shown(text)}; kinds: {kinds}"
            )
        kind = Kind(match[2])
        if (match[4] or "") != _ARROWS.get(kind, ""):
            want = f"{match[1]}{kind}{match[3]}{_ARROWS.get(kind, '')}"
            raise ScheduleError(
                f"sends end in '>' and the stage they go to, receives in '<' and the stage they come from, "
                f"others in neither; got {text!r}; write {want}{'<stage>' if kind in _ARROWS else ''}"
            )
        return cls(int(match[1]), kind, int(match[3]), int(match[5]) if match[5] else None)
