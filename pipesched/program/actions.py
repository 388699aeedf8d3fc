"""Actions: the steps of a rank's order, such as a forward or a send, and the table of their kinds.

Programs, errors, traces and pictures write actions in the same text form. ``2F0`` is the forward of stage 2 for
micro-batch 0. ``0SEND_F3>1`` sends the output of stage 0 for micro-batch 3 to stage 1, and ``1RECV_F3<0`` receives it
there. ``Action.parse`` is the inverse of ``str``.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from pipesched.checks import shown
from pipesched.errors import ScheduleError

__all__ = ["KINDS", "NUMBERED", "OTHER_END", "Action", "Holding", "Kind", "Lane"]


class Lane(StrEnum):
    """The resource of a rank that an action occupies. A rank's bubble is the idle time of COMPUTE only."""

    COMPUTE = "compute"
    COPY = "copy"
    COLLECTIVE = "collective"  # a rank runs its collectives one at a time, in the order of its actions


class Kind(StrEnum):
    """The kind of an action: F, B, I, W, and so on. ``str(kind)`` is its text form."""

    F = "F"  # forward
    B = "B"  # full backward: input and weight gradients
    I = "I"  # noqa: E741  input gradients only
    W = "W"  # weight gradients, after I
    R = "R"  # recompute the activations that a checkpointed F did not keep
    NORM = "NORM"  # compute the norms of a stage's gradients; each UPDATE with this number, on any stage, needs them
    UPDATE = "UPDATE"  # an optimizer step on a stage's weights; has a number, counted from 0, instead of a micro-batch
    SEND_F = "SEND_F"  # a stage's output, to a consumer
    RECV_F = "RECV_F"  # a stage's input, from a producer
    SEND_B = "SEND_B"  # the gradient of a stage's input, to its producer
    RECV_B = "RECV_B"  # the gradient of a stage's output, from a consumer
    OFFLOAD = "OFFLOAD"  # start copying activations to the host
    FREE = "FREE"  # wait for the end of the copy, then free the activations on the device
    FETCH = "FETCH"  # start copying the activations back to the device
    REDUCE = "REDUCE"  # sum a bucket of a stage's gradients over all replicas; has a bucket instead of a micro-batch
    UNSHARD = "UNSHARD"  # gather a stage's weights, which replicas split; has a number instead of a micro-batch
    RESHARD = "RESHARD"  # free the weights that the UNSHARD with the same number gathered


class Holding(StrEnum):
    """A kind of memory that a rank holds for a (stage, micro-batch) pair, a weight version, a bucket or a gather."""

    INPUT = "input"  # the stage's input; a checkpointed forward keeps nothing else
    ACTIVATIONS = "activations"  # the tensors saved for the backward
    OFFLOADED = "offloaded"  # the part of the activations that is on the host between FREE and FETCH
    WEIGHT_GRAD = "weight_grad"  # the tensors that W needs, held from the I to the W
    REDUCTION = "reduction"  # a flat copy of a bucket of gradients, while its REDUCE runs
    WEIGHTS = "weights"  # an old version of a stage's weights that micro-batches in flight still use
    GATHERED = "gathered"  # the full (unsharded) weights of a stage, from the UNSHARD to the RESHARD


class _KindRow(NamedTuple):
    """The properties of a kind of action: its lane, the memory taken at its start, and the memory freed at its end."""

    lane: Lane
    takes: Holding | None = None
    gives: tuple[Holding, ...] = ()


_EVERYTHING = (Holding.INPUT, Holding.ACTIVATIONS, Holding.WEIGHT_GRAD)

#: The table of kinds. F takes INPUT instead of ACTIVATIONS if the program has an R for its (stage, micro-batch) pair.
#: UPDATE takes WEIGHTS only if micro-batches in flight still use the version that it replaces. This memory is freed
#: when the last of these micro-batches has finished.
KINDS: dict[Kind, _KindRow] = {
    Kind.F: _KindRow(Lane.COMPUTE, takes=Holding.ACTIVATIONS),
    Kind.B: _KindRow(Lane.COMPUTE, gives=_EVERYTHING),
    Kind.I: _KindRow(Lane.COMPUTE, takes=Holding.WEIGHT_GRAD, gives=(Holding.INPUT, Holding.ACTIVATIONS)),
    Kind.W: _KindRow(Lane.COMPUTE, gives=_EVERYTHING),
    Kind.R: _KindRow(Lane.COMPUTE, takes=Holding.ACTIVATIONS, gives=(Holding.INPUT,)),
    Kind.NORM: _KindRow(Lane.COMPUTE),
    Kind.UPDATE: _KindRow(Lane.COMPUTE, takes=Holding.WEIGHTS),
    Kind.SEND_F: _KindRow(Lane.COPY),
    Kind.RECV_F: _KindRow(Lane.COPY),
    Kind.SEND_B: _KindRow(Lane.COPY),
    Kind.RECV_B: _KindRow(Lane.COPY),
    Kind.OFFLOAD: _KindRow(Lane.COPY),
    Kind.FREE: _KindRow(Lane.COPY, gives=(Holding.OFFLOADED,)),
    Kind.FETCH: _KindRow(Lane.COPY, takes=Holding.OFFLOADED),
    Kind.REDUCE: _KindRow(Lane.COLLECTIVE, takes=Holding.REDUCTION, gives=(Holding.REDUCTION,)),
    Kind.UNSHARD: _KindRow(Lane.COLLECTIVE, takes=Holding.GATHERED),
    Kind.RESHARD: _KindRow(Lane.COPY, gives=(Holding.GATHERED,)),
}

#: The kinds whose actions have the number of a bucket or a gather, from 0 on each stage, instead of a micro-batch.
NUMBERED = (Kind.REDUCE, Kind.UNSHARD, Kind.RESHARD)

#: Maps each kind of send to the kind of its receive, and each kind of receive to the kind of its send.
OTHER_END: dict[Kind, Kind] = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_F: Kind.SEND_F,
    Kind.RECV_B: Kind.SEND_B,
}

_ARROWS = {Kind.SEND_F: ">", Kind.SEND_B: ">", Kind.RECV_F: "<", Kind.RECV_B: "<"}
_TEXT = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{1,9})(?:([<>])([0-9]{1,9}))?")


class Action(NamedTuple):
    """An operation of one stage on one micro-batch. For a transfer, ``peer`` is the stage at the other end, else None.

    In place of a micro-batch, UPDATE and NORM have the number of the update, REDUCE the number of the bucket, and
    UNSHARD and RESHARD the number of the gather.
    """

    stage: int
    kind: Kind
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        end = "" if self.peer is None else f"{_ARROWS.get(self.kind, '>')}{self.peer}"
        return f"{self.stage}{self.kind.value}{self.microbatch}{end}"

    @property
    def lane(self) -> Lane:
        """The lane that the action occupies: compute, copy or collective."""
        return KINDS[self.kind].lane

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Parse the text form of an action. Raises ScheduleError for any other text."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[2] not in Kind.__members__:
            kinds = ", ".join(Kind)
            raise ScheduleError(
                f"an action must have the form <stage><kind><micro-batch>, such as 2F0; got {shown(text)}; use one "
                f"of the kinds {kinds}"
            )
        kind = Kind(match[2])
        if (match[4] or "") != _ARROWS.get(kind, ""):
            want = f"{match[1]}{kind}{match[3]}{_ARROWS.get(kind, '')}"
            raise ScheduleError(
                f"a send must end with '>' and the receiving stage, a receive must end with '<' and the sending "
                f"stage, and any other action must end with its micro-batch; got {text!r}; write "
                f"{want}{'<stage>' if kind in _ARROWS else ''}"
            )
        return cls(int(match[1]), kind, int(match[3]), int(match[5]) if match[5] else None)
