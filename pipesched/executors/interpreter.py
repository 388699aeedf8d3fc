"""Interpreter: the loop over one rank's order, the same for every executor.

A rank has stages, a transport, and a table kind -> handler. What stages hand to each other waits in its inbox until
the action that takes it; a value for another rank waits in its outbox until its send.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from pipesched.actions import Action, Kind
from pipesched.errors import ExecutionError
from pipesched.program import Program

__all__ = ["Rank", "StageLike", "Transport", "interpret"]


class StageLike(Protocol):
    """What a stage does for a micro-batch. ``arrived``: one value a producer; ``grads``: one a consumer."""

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Any:
        """F: returns the stage's output."""

    def recompute(self, microbatch: int, *, split: bool) -> None:
        """R."""

    def backward(self, microbatch: int, *grads: Any) -> Any:
        """B: returns the gradient for the producers."""

    def input_grad(self, microbatch: int, *grads: Any) -> Any:
        """I: returns the gradient for the producers."""

    def weight_grad(self, microbatch: int) -> None:
        """W."""

    def update(self, number: int) -> None:
        """UPDATE: the optimizer's step, with the gradients since the one before."""


class Transport(Protocol):
    """How values get from rank to rank: first in, first out for each (from, to, kind)."""

    def send(self, action: Action, value: Any) -> None:
        """Send without waiting for the receiver."""

    def receive(self, action: Action) -> Any:
        """Wait for the value, and return it on this rank's device."""


class Timer(Protocol):
    """Says when actions start and end, in seconds since the step's start."""

    def now(self) -> Any:
        """A stamp for this moment; a float, or an event that is read after the step."""


class _Slot(NamedTuple):
    """Where a value waits: the kind of action that takes it, by whom, from whom."""

    taker: int
    kind: Kind
    microbatch: int
    giver: int


class Rank:
    """One rank's side of one step, or of a stream of steps.

    ``order``: the part of its order to run, all of it unless given; a stream gives one part after the other. pair: the
    program's micro-batch that is run as one of a stream is.
    """

    def __init__(
        self,
        index: int,
        program: Program,
        stages: Mapping[int, StageLike],
        transport: Transport,
        timer: Timer,
        order: tuple[Action, ...] | None = None,
        pair: Callable[[int], int] = lambda microbatch: microbatch,
    ) -> None:
        self.index = index
        self.order = program.orders[index] if order is None else order
        self.timer = timer
        self.stamps: list[tuple[Action, Any, Any]] = []
        self._program = program
        self._pair = pair
        self._stages = stages
        self._transport = transport
        whole = program.orders[index]  # also what runs in another part of the order
        self._split = {(action.stage, action.microbatch) for action in whole if action.kind is Kind.I}
        self._recomputed = {(action.stage, action.microbatch) for action in whole if action.kind is Kind.R}
        self._inbox: dict[_Slot, Any] = {}
        self._outbox: dict[_Slot, Any] = {}
        self.handlers: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_grad,
            Kind.W: self._weight_grad,
            Kind.R: self._recompute,
            Kind.UPDATE: self._update,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
        }

    def _forward(self, action: Action) -> None:
        stage, _, microbatch, _ = action
        arrived = [self._take(action, Kind.F, producer) for producer in self._program.graph.producers[stage]]
        output = self._stages[stage].forward(
            microbatch,
            *arrived,
            split=(stage, self._pair(microbatch)) in self._split,
            checkpointed=(stage, self._pair(microbatch)) in self._recomputed,
        )
        for consumer in self._program.graph.consumers[stage]:
            self._give(action, Kind.F, consumer, output)

    def _recompute(self, action: Action) -> None:
        split = (action.stage, self._pair(action.microbatch)) in self._split
        self._stages[action.stage].recompute(action.microbatch, split=split)

    def _backward(self, action: Action) -> None:
        self._give_back(action, self._stages[action.stage].backward(action.microbatch, *self._grads(action)))

    def _input_grad(self, action: Action) -> None:
        self._give_back(action, self._stages[action.stage].input_grad(action.microbatch, *self._grads(action)))

    def _weight_grad(self, action: Action) -> None:
        self._stages[action.stage].weight_grad(action.microbatch)

    def _update(self, action: Action) -> None:
        self._stages[action.stage].update(action.microbatch)

    def _grads(self, action: Action) -> list[Any]:
        return [self._take(action, Kind.B, consumer) for consumer in self._program.graph.consumers[action.stage]]

    def _give_back(self, action: Action, grads: Any) -> None:
        for producer in self._program.graph.producers[action.stage]:
            self._give(action, Kind.B, producer, grads)

    def _give(self, action: Action, kind: Kind, taker: int, value: Any) -> None:
        """Leave a value for a stage of this rank, or in the outbox for its send."""
        here = self._program.placement[taker] == self.index
        box = self._inbox if here else self._outbox
        box[_Slot(taker, kind, action.microbatch, action.stage)] = value

    def _take(self, action: Action, kind: Kind, giver: int) -> Any:
        slot = _Slot(action.stage, kind, action.microbatch, giver)
        if slot not in self._inbox:
            raise ExecutionError(f"{action} needs what stage {giver} gives, which has not come; validate the program")
        return self._inbox.pop(slot)

    def _send(self, action: Action) -> None:
        kind = Kind.F if action.kind is Kind.SEND_F else Kind.B
        slot = _Slot(_peer(action), kind, action.microbatch, action.stage)
        if slot not in self._outbox:
            raise ExecutionError(f"{action} has nothing to send; validate the program")
        self._transport.send(action, self._outbox.pop(slot))

    def _receive(self, action: Action) -> None:
        kind = Kind.F if action.kind is Kind.RECV_F else Kind.B
        self._inbox[_Slot(action.stage, kind, action.microbatch, _peer(action))] = self._transport.receive(action)


def _peer(action: Action) -> int:
    if action.peer is None:
        raise ExecutionError(f"{action} says no stage at its other end; lower the program, which names it")
    return action.peer


def interpret(rank: Rank) -> Iterator[Action]:
    """Run a rank's order. Yields each action before it runs: the executor resumes when it may.

    An exception of a handler is passed on with a note that says where it happened.
    """
    now, handlers, stamp = rank.timer.now, rank.handlers, rank.stamps.append
    for position, action in enumerate(rank.order):
        yield action
        start = now()
        try:
            handlers[action.kind](action)
        except BaseException as error:
            what = "update" if action.kind is Kind.UPDATE else "micro-batch"
            error.add_note(
                f"in {action} (stage {action.stage}, {what} {action.microbatch}), "
                f"rank {rank.index}, position {position} of its order"
            )
            raise
        stamp((action, start, now()))
