"""Actions: the steps of a rank's order, such as a forward or a send, and the table of their kinds.

Programs, errors, traces and pictures write actions in the same text form. ``2F0`` is the forward of stage 2 for
micro-batch 0. ``0SEND_F3>1`` sends the output of stage 0 for micro-batch 3 to stage 1, and ``1RECV_F3<0`` receives it
there. ``Action.parse`` is the inverse of ``str``.

`Kind` is the table. Each kind has one `KindRow` with all that is known of the kind. The row refers to other kinds, to
fields of `Costs` and to methods of a stage by their names, so that this module needs none of them.
"""

import re
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import cached_property
from typing import Any, NamedTuple

from pipesched.checks import shown
from pipesched.errors import ScheduleError

__all__ = [
    "BACKWARD_MESSAGES",
    "NUMBERED",
    "ON_COPIES",
    "OTHER_END",
    "RECEIVES",
    "SENDS",
    "Action",
    "At",
    "Holding",
    "Kind",
    "Lane",
    "Need",
    "Queue",
    "KindRow",
    "Transfer",
]


class Lane(StrEnum):
    """The resource of a rank that an action occupies. A rank's bubble is the idle time of COMPUTE only."""

    COMPUTE = "compute"
    COPY = "copy"
    COLLECTIVE = "collective"  # a rank runs its collectives one at a time, in the order of its actions
    REDUNDANCY = "redundancy"  # copies of a rank's state, which outlive the rank


class Queue(Enum):
    """What runs an action that its rank only starts. On each rank, the actions of a queue run one after the other."""

    TO_HOST = auto()  # copies to the host
    FROM_HOST = auto()  # copies from the host
    COLLECTIVES = auto()
    REDUNDANCY = auto()
    MESSAGES = auto()  # a queue for each other rank


class Holding(StrEnum):
    """A kind of memory that a rank holds for a (stage, micro-batch) pair, a weight version, a bucket or a gather."""

    INPUT = "input"  # the stage's input; a checkpointed forward keeps nothing else
    ACTIVATIONS = "activations"  # the tensors saved for the backward
    OFFLOADED = "offloaded"  # the part of the activations that is on the host between FREE and FETCH
    WEIGHT_GRAD = "weight_grad"  # the tensors that W needs, held from the I to the W
    REDUCTION = "reduction"  # a flat copy of a bucket of gradients, while its REDUCE runs
    WEIGHTS = "weights"  # an old version of a stage's weights that micro-batches in flight still use
    GATHERED = "gathered"  # the full (unsharded) weights of a stage, from the UNSHARD to the RESHARD


class At(Enum):
    """The stage of a needed action: the same stage, its producers, its consumers, or the peer of a transfer.

    Three members have a special meaning:

    - EVERY: the action needs an action of every stage, but only if its own stage has an action of the needed kind.
    - NUMBERED: the action needs all actions of the needed kind on its stage, such as the REDUCEs of all buckets. A
      stage without such actions has no such need.
    - GATHER: the action needs the UNSHARD that gathers the weights it uses. The number of this UNSHARD equals the count
      of the stage's RESHARDs before the action.
    """

    OWN = auto()
    PRODUCERS = auto()
    CONSUMERS = auto()
    PEER = auto()
    EVERY = auto()
    NUMBERED = auto()
    GATHER = auto()


class Need:
    """One dependency: the stage of the needed action (``at``) and its possible kinds, in order of preference.

    The kinds are alternatives: a backward may be split (I) or whole (B), a stage may be recomputed (R), and an edge may
    need a transfer (RECV) or stay within one rank. The first alternative that the program contains is used. If the
    program contains none of them, an action of the last kind is reported as missing.
    """

    def __init__(self, at: At, *names: str) -> None:
        self.at = at
        self._names = names

    @cached_property
    def kinds(self) -> "tuple[Kind, ...]":
        """The possible kinds of the needed action."""
        return tuple(Kind(name) for name in self._names)


class Transfer(NamedTuple):
    """The properties of a kind that sends or receives a message."""

    #: The kind of the action at the other end of the message.
    other_end: str
    #: Stands before the stage at the other end in the text form: ``>`` after a send, ``<`` after a receive.
    arrow: str
    #: The kind of the action whose result is sent: F for an output, B for the gradient of an output.
    result_of: str

    @property
    def sends(self) -> bool:
        """Whether the action sends the message."""
        return self.arrow == ">"

    @property
    def backward(self) -> bool:
        """Whether the message is a gradient, which goes from a consumer of an output to its producer."""
        return self.result_of == "B"


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """All that is known of a kind of action."""

    #: The kind's name in the text form of an action.
    text: str
    lane: Lane
    #: The method of a stage that runs the action. It gets the action's number. `runtime/executors/interpreter.py` has
    #: the few handlers whose calls get more, or whose results go to other actions.
    handler: str
    #: What the number in the text form counts: micro-batches, updates, or the buckets or gathers of a stage. With any
    #: other word than "micro-batch" and "update", a stage's actions are numbered from 0 without a gap (`NUMBERED`).
    number: str = "micro-batch"
    #: The actions that must have ended before the action starts. On its own rank, a need is an order: a rank waits for
    #: an action of a ``queue`` only through ``spans``, or if the handler of the needing action waits.
    needs: tuple[Need, ...] = ()
    #: What runs the action while its rank goes on to the next action. None: the rank waits for the action's end. The
    #: lane is then COLLECTIVE for the queue of collectives, and COPY for all other queues.
    queue: Queue | None = None
    #: For a send or a receive, its other end.
    transfer: Transfer | None = None
    #: The fields of `Costs` that add up to the action's time. The measured time corrects the first. Default: the time
    #: is in `Costs.other_s`. Measured times of copies correct nothing.
    costs: tuple[str, ...] = ()
    #: The kinds whose measured times correct the action's cost in a step without such actions.
    instead: tuple[str, ...] = ()
    #: Whether the rank that holds the copy of the stage runs the action (`Program.copy_ranks`), not the stage's rank.
    on_copy: bool = False
    #: The memory that the action takes at its start, and keeps.
    takes: Holding | None = None
    #: The memory that the action frees at its end, if an action with the same number took it. An action of a ``queue``
    #: frees it at its place in the order, which is too early; let an action that waits for its end free it.
    gives: tuple[Holding, ...] = ()
    #: The field of `Costs` with the memory that the action needs only while it runs.
    transient: str = ""
    #: The method of a stage that waits for the stage's actions of a queue, and returns their starts and ends. Where the
    #: stage does not know them, it returns {}.
    spans: str = ""
    #: The name in legends and notes. Default: only the text form.
    label: str = ""
    #: The colour in pictures, as ``#rrggbb``. Default: grey.
    colour: str = ""
    #: The letter before the number in a text timeline, for actions in a line below those of their rank.
    letter: str = ""
    #: The character of the action in a text timeline without labels.
    block: str = "▞"


_EVERYTHING = (Holding.INPUT, Holding.ACTIVATIONS, Holding.WEIGHT_GRAD)
_GATHERED = Need(At.GATHER, "UNSHARD")
_REDUCED = Need(At.NUMBERED, "REDUCE")
_BACKWARD = (Need(At.OWN, "FETCH", "R", "F"), Need(At.CONSUMERS, "RECV_B", "I", "B"), _GATHERED)


class Kind(StrEnum):
    """The kind of an action: F, B, I, W, and so on. ``str(kind)`` is its text form, and ``kind.row`` its properties.

    F takes INPUT instead of ACTIVATIONS if the program has an R for its (stage, micro-batch) pair. UPDATE takes WEIGHTS
    only if micro-batches in flight still use the version that it replaces. This memory is freed when the last of these
    micro-batches has finished.
    """

    row: KindRow

    def __new__(cls, row: Any) -> "Kind":  # a KindRow; Any lets type checkers accept Kind("F")
        kind = str.__new__(cls, row.text)
        kind._value_ = row.text
        kind.row = row
        return kind

    # forward
    F = KindRow(
        text="F",
        lane=Lane.COMPUTE,
        handler="forward",
        needs=(Need(At.PRODUCERS, "RECV_F", "F"), _GATHERED),
        costs=("forward_s",),
        takes=Holding.ACTIVATIONS,
        transient="forward_transient_bytes",
        label="forward",
        colour="#56b4e9",
        block="▄",
    )
    # full backward: input and weight gradients
    B = KindRow(
        text="B",
        lane=Lane.COMPUTE,
        handler="backward",
        needs=_BACKWARD,
        costs=("backward_s",),
        instead=("I", "W"),
        gives=_EVERYTHING,
        transient="backward_transient_bytes",
        label="backward",
        colour="#e69f00",
        block="█",
    )
    # input gradients only
    I = KindRow(  # noqa: E741
        text="I",
        lane=Lane.COMPUTE,
        handler="input_grad",
        needs=_BACKWARD,
        costs=("input_grad_s",),
        instead=("B",),
        takes=Holding.WEIGHT_GRAD,
        gives=(Holding.INPUT, Holding.ACTIVATIONS),
        transient="input_grad_transient_bytes",
        label="input gradients",
        colour="#d55e00",
        block="▓",
    )
    # weight gradients, after I
    W = KindRow(
        text="W",
        lane=Lane.COMPUTE,
        handler="weight_grad",
        needs=(Need(At.OWN, "I"), _GATHERED),
        costs=("weight_grad_s",),
        instead=("B",),
        gives=_EVERYTHING,
        transient="weight_grad_transient_bytes",
        label="weight gradients",
        colour="#009e73",
        block="░",
    )
    # recompute the activations that a checkpointed F did not keep
    R = KindRow(
        text="R",
        lane=Lane.COMPUTE,
        handler="recompute",
        needs=(Need(At.OWN, "F"), _GATHERED),
        costs=("recompute_s",),
        takes=Holding.ACTIVATIONS,
        gives=(Holding.INPUT,),
        transient="forward_transient_bytes",
        label="recompute",
        colour="#cc79a7",
        block="▒",
    )
    # the norms of a stage's gradients, for clipping; each UPDATE with the same number, on any stage, waits for it
    NORM = KindRow(
        text="NORM",
        lane=Lane.COMPUTE,
        handler="norm",
        number="update",
        needs=(_REDUCED,),
        costs=("norm_s",),
        label="gradient norm",
        colour="#f0e442",
    )
    # an optimizer step on a stage's weights
    UPDATE = KindRow(
        text="UPDATE",
        lane=Lane.COMPUTE,
        handler="update",
        number="update",
        needs=(_REDUCED, Need(At.NUMBERED, "RESHARD"), Need(At.NUMBERED, "KEEP"), Need(At.EVERY, "NORM")),
        costs=("update_s", "gather_s"),
        takes=Holding.WEIGHTS,
        transient="update_transient_bytes",
        label="optimizer step",
    )
    # a stage's output, to a consumer
    SEND_F = KindRow(
        text="SEND_F",
        lane=Lane.COPY,
        handler="send",
        needs=(Need(At.OWN, "F"),),
        queue=Queue.MESSAGES,
        transfer=Transfer("RECV_F", ">", "F"),
    )
    # a stage's input, from a producer
    RECV_F = KindRow(
        text="RECV_F",
        lane=Lane.COPY,
        handler="receive",
        needs=(Need(At.PEER, "SEND_F"),),
        transfer=Transfer("SEND_F", "<", "F"),
    )
    # the gradient of a stage's input, to its producer
    SEND_B = KindRow(
        text="SEND_B",
        lane=Lane.COPY,
        handler="send",
        needs=(Need(At.OWN, "I", "B"),),
        queue=Queue.MESSAGES,
        transfer=Transfer("RECV_B", ">", "B"),
    )
    # the gradient of a stage's output, from a consumer
    RECV_B = KindRow(
        text="RECV_B",
        lane=Lane.COPY,
        handler="receive",
        needs=(Need(At.PEER, "SEND_B"),),
        transfer=Transfer("SEND_B", "<", "B"),
    )
    # start copying activations to the host
    OFFLOAD = KindRow(
        text="OFFLOAD",
        lane=Lane.COPY,
        handler="offload",
        needs=(Need(At.OWN, "F"),),
        queue=Queue.TO_HOST,
        costs=("offload_s",),
        label="copy to the host",
    )
    # wait for the end of the copy, then free the activations on the device
    FREE = KindRow(
        text="FREE",
        lane=Lane.COPY,
        handler="free",
        needs=(Need(At.OWN, "OFFLOAD"),),
        gives=(Holding.OFFLOADED,),
    )
    # start copying the activations back to the device
    FETCH = KindRow(
        text="FETCH",
        lane=Lane.COPY,
        handler="fetch",
        needs=(Need(At.OWN, "FREE"),),
        queue=Queue.FROM_HOST,
        costs=("fetch_s",),
        takes=Holding.OFFLOADED,
        label="copy from the host",
    )
    # sum a bucket of a stage's gradients over all replicas
    REDUCE = KindRow(
        text="REDUCE",
        lane=Lane.COLLECTIVE,
        handler="reduce",
        number="bucket",
        queue=Queue.COLLECTIVES,
        costs=("reduce_s",),
        takes=Holding.REDUCTION,
        gives=(Holding.REDUCTION,),
        spans="reduced",
        label="gradient reduction",
        colour="#0072b2",
        block="=",
    )
    # gather a stage's weights, which replicas split
    UNSHARD = KindRow(
        text="UNSHARD",
        lane=Lane.COLLECTIVE,
        handler="unshard",
        number="gather",
        queue=Queue.COLLECTIVES,
        costs=("unshard_s",),
        takes=Holding.GATHERED,
        spans="gathered",
        label="weight gather",
        colour="#000000",
        letter="U",
        block="+",
    )
    # free the weights that the UNSHARD with the same number gathered
    RESHARD = KindRow(
        text="RESHARD",
        lane=Lane.COPY,
        handler="reshard",
        number="gather",
        needs=(Need(At.OWN, "UNSHARD"),),
        gives=(Holding.GATHERED,),
    )
    # send the gradients of a stage's previous update to the rank that holds a copy of the stage
    MIRROR = KindRow(
        text="MIRROR",
        lane=Lane.REDUNDANCY,
        handler="mirror",
        number="update",
        queue=Queue.REDUNDANCY,
        spans="mirrored",
        label="gradients to a copy",
        colour="#332288",
        letter="M",
        block="▌",
    )
    # set a stage's weights and optimizer state aside, once all gradients of the previous update have arrived
    KEEP = KindRow(
        text="KEEP",
        lane=Lane.REDUNDANCY,
        handler="keep",
        number="update",
        needs=(Need(At.EVERY, "MIRROR"),),
        queue=Queue.REDUNDANCY,
        costs=("keep_s",),
        spans="kept",
        label="state set aside",
        colour="#999933",
        letter="K",
        block="▐",
    )
    # the previous update again, on the copy of a stage
    REPLAY = KindRow(
        text="REPLAY",
        lane=Lane.REDUNDANCY,
        handler="replay",
        number="update",
        needs=(Need(At.OWN, "MIRROR"),),
        queue=Queue.REDUNDANCY,
        costs=("replay_s",),
        on_copy=True,
        spans="replayed",
        label="update of a copy",
        colour="#aa4499",
        letter="R",
        block="▀",
    )


#: The kinds whose actions have the number of a bucket or a gather, from 0 on each stage, instead of a micro-batch.
NUMBERED = tuple(kind for kind in Kind if kind.row.number not in ("micro-batch", "update"))

#: The kinds whose actions are on the rank that holds the copy of their stage.
ON_COPIES = tuple(kind for kind in Kind if kind.row.on_copy)

#: Maps each kind of send to the kind of its receive, and each kind of receive to the kind of its send.
OTHER_END: dict[Kind, Kind] = {kind: Kind(kind.row.transfer.other_end) for kind in Kind if kind.row.transfer}

SENDS = tuple(kind for kind in Kind if kind.row.transfer and kind.row.transfer.sends)
RECEIVES = tuple(kind for kind in OTHER_END if kind not in SENDS)
#: The sends and receives of gradients.
BACKWARD_MESSAGES = tuple(kind for kind in Kind if kind.row.transfer and kind.row.transfer.backward)

_ARROWS = {kind: kind.row.transfer.arrow for kind in Kind if kind.row.transfer}
_TEXT = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{1,9})(?:([<>])([0-9]{1,9}))?")


class Action(NamedTuple):
    """An operation of one stage on one micro-batch. For a transfer, ``peer`` is the stage at the other end, else None.

    Some kinds have another number in place of a micro-batch, such as the number of an update or a bucket: see
    `KindRow.number`.
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
        """The lane that the action occupies: compute, copy, collective or redundancy."""
        return self.kind.row.lane

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
