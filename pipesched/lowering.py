"""Lowering: passes ``Program -> Program`` that add what the author of a schedule leaves out."""

from collections.abc import Callable, Iterator
from typing import Literal, get_args

from pipesched.actions import OTHER_END, Action, Kind
from pipesched.dependencies import BACKWARDS
from pipesched.errors import ScheduleError
from pipesched.program import Program

__all__ = ["CheckpointMode", "add_communication", "add_recompute", "forward_then_backward", "halves", "lower"]

CheckpointMode = Literal["never", "always", "except_last"]


def lower(program: Program) -> Program:
    """Turn a compute-only program into one that an executor runs: adds communication."""
    return add_communication(program)


def add_communication(program: Program) -> Program:
    """Add a send behind each producer and a receive before each consumer on another rank.

    A channel is (sending rank, receiving rank, kind), first in first out. Receives stand in the order of the sends
    of their channel: each as late as its consumer allows, and earlier where a later message is used first.
    A program that already has transfers is returned as it is.
    """
    if any(action.kind is Kind.SEND_F for action in program.positions):
        return program
    sends = {action: tuple(_sends(program, action)) for action in program.positions}
    pending = _Pending(program, sends)
    return program.with_orders(
        (lowered for action in order for lowered in (*pending.before(rank, action), action, *sends[action]))
        for rank, order in enumerate(program.orders)
    )


def _sends(program: Program, action: Action) -> Iterator[Action]:
    stage, kind, microbatch, _ = action
    rank = program.placement[stage]
    if kind is Kind.F:
        ends, sent = program.graph.consumers[stage], Kind.SEND_F
    elif kind in BACKWARDS:
        ends, sent = program.graph.producers[stage], Kind.SEND_B
    else:
        return
    for end in ends:
        if program.placement[end] != rank:
            yield Action(stage, sent, microbatch, end)


_Channel = tuple[int, int, Kind]


class _Pending:
    """The receives of each channel that are not placed yet, in the order of the sends."""

    def __init__(self, program: Program, sends: dict[Action, tuple[Action, ...]]) -> None:
        self._consumer_kinds = {Kind.RECV_F: (Kind.F,), Kind.RECV_B: BACKWARDS}
        self._queues: dict[_Channel, list[Action]] = {}
        self._channel_of: dict[Action, _Channel] = {}
        self._needed: dict[Action, list[Action]] = {}
        for order in program.orders:
            for send in (send for action in order for send in sends[action]):
                self._expect(program, send)
        for queue in self._queues.values():
            queue.reverse()  # so that pop() takes the first
        self._placed: set[Action] = set()

    def _expect(self, program: Program, send: Action) -> None:
        stage, kind, microbatch, peer = send
        assert peer is not None  # _sends gives every send its peer
        receive = Action(peer, OTHER_END[kind], microbatch, stage)
        channel = program.placement[stage], program.placement[peer], kind
        self._queues.setdefault(channel, []).append(receive)
        self._channel_of[receive] = channel
        for consumer in self._consumer_kinds[receive.kind]:
            self._needed.setdefault(Action(peer, consumer, microbatch), []).append(receive)

    def before(self, rank: int, action: Action) -> Iterator[Action]:
        """The receives that must stand before ``action``, each channel's in the order of its sends."""
        for receive in self._needed.pop(action, ()):
            queue = self._queues[self._channel_of[receive]]
            while queue and receive not in self._placed:
                first = queue.pop()
                self._placed.add(first)
                yield first


def add_recompute(program: Program, mode: CheckpointMode) -> Program:
    """Put an R just before each backward whose forward is checkpointed.

    never: none. always: all. except_last: all but those whose backward directly follows its forward on its rank.
    Raises ScheduleError for another mode.
    """
    if mode not in get_args(CheckpointMode):
        raise ScheduleError(
            f"checkpoint is one of {', '.join(get_args(CheckpointMode))}; got {mode!r}; choose one of them"
        )
    if mode == "never" or program.forward_only:
        return program
    keep: Callable[[Action, Action | None], bool] = (
        (lambda action, before: False) if mode == "always" else _directly_follows
    )
    return program.with_orders(_with_recompute(order, keep) for order in program.orders)


def _directly_follows(action: Action, before: Action | None) -> bool:
    return before == Action(action.stage, Kind.F, action.microbatch)


def _with_recompute(order: tuple[Action, ...], keep: Callable[[Action, Action | None], bool]) -> Iterator[Action]:
    written = {(action.stage, action.microbatch) for action in order if action.kind is Kind.R}
    before: Action | None = None
    for action in order:
        pair = action.stage, action.microbatch
        if action.kind in BACKWARDS and pair not in written and not keep(action, before):
            yield Action(action.stage, Kind.R, action.microbatch)
        yield action
        before = action


def forward_then_backward(program: Program) -> Program:
    """All forwards in the program's order, then all backwards in its order, whole: GPipe over the same placement.

    What another program's validity proves holds here: taking actions out, or putting all forwards first, adds no wait.
    """

    def whole(action: Action) -> Action:
        return Action(action.stage, Kind.B, action.microbatch)

    return program.with_orders(
        [a for a in order if a.kind is Kind.F] + [whole(a) for a in order if a.kind in BACKWARDS]
        for order in program.orders
    )


def halves(program: Program) -> tuple[tuple[tuple[Action, ...], ...], tuple[tuple[Action, ...], ...]]:
    """The orders of such a program, lowered, up to each rank's last forward or its send; and the rest."""
    forward_kinds = (Kind.F, Kind.SEND_F, Kind.RECV_F)
    cuts = [
        next((i for i, action in enumerate(order) if action.kind not in forward_kinds), len(order))
        for order in program.orders
    ]
    pairs = list(zip(program.orders, cuts, strict=True))
    return tuple(order[:cut] for order, cut in pairs), tuple(order[cut:] for order, cut in pairs)
