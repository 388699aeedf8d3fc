"""Interpreter: the loop over one rank's order, the same for every executor.

A rank binds its order once: each action becomes a call whose stage, micro-batch and channel are looked up, with the
edges whose values it takes and gives. A value waits on its edge until the action that takes it, which is a send where
its taker is on another rank. The loop only calls.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from pipesched.errors import ExecutionError
from pipesched.program.actions import Action, Kind
from pipesched.program.program import Program
from pipesched.tensors.payload import PerConsumer

__all__ = ["Rank", "StageLike", "Stamps", "Transport", "interpret"]


class StageLike(Protocol):
    """What a stage does for a micro-batch. ``arrived``: one value a producer; ``grads``: one a consumer."""

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Any:
        """F: returns the stage's output, or PerConsumer one for each consumer."""

    def recompute(self, microbatch: int, *, split: bool) -> None:
        """R."""

    def backward(self, microbatch: int, *grads: Any) -> PerConsumer:
        """B: returns a gradient for each producer."""

    def input_grad(self, microbatch: int, *grads: Any) -> PerConsumer:
        """I: returns a gradient for each producer."""

    def weight_grad(self, microbatch: int) -> None:
        """W."""

    def offload(self, microbatch: int) -> None:
        """OFFLOAD: begin to copy what some layers have saved to the host."""

    def free(self, microbatch: int) -> None:
        """FREE: once that is copied, give its memory back."""

    def fetch(self, microbatch: int) -> None:
        """FETCH: begin to bring it back; the backward waits for it."""

    def update(self, number: int) -> None:
        """UPDATE: the optimizer's step, with the gradients since the one before."""


class Transport(Protocol):
    """How values get from rank to rank: first in, first out for each (from, to, kind)."""

    def sender(self, action: Action) -> Callable[[Any], None]:
        """What sends a value as this action does, without waiting for the receiver."""

    def receiver(self, action: Action) -> Callable[[], Any]:
        """What waits for the value of this action, and returns it on this rank's device."""


class _Timer(Protocol):
    """Says when actions start and end, in seconds since the step's start."""

    def now(self) -> Any:
        """A stamp for this moment; a float, or an event that is read after the step."""


class Stamps(NamedTuple):
    """When each action of an order started and ended, as the rank's timer says it; None where it has not yet."""

    order: Sequence[Action]
    starts: list[Any]
    ends: list[Any]

    @classmethod
    def room_for(cls, order: Sequence[Action]) -> "Stamps":
        """Of an order that has not run."""
        return cls(order, [None] * len(order), [None] * len(order))


#: Whose value it is: by which stage it is given, by which it is taken, whether backward, and for which micro-batch.
_Ends = tuple[int, int, bool, int]


class _Edge:
    """Where a value waits. A rank looks its edges up once, as it binds its order."""

    __slots__ = ("giver", "value")

    def __init__(self, giver: int) -> None:
        self.giver = giver
        self.value: Any = _NOTHING


class _Nothing:
    """No value has come, or it has been taken."""


_NOTHING = _Nothing()


def _taken(edge: _Edge) -> Any:
    value = edge.value
    edge.value = _NOTHING
    if value is _NOTHING:
        raise ExecutionError(f"what stage {edge.giver} gives has not come; validate the program")
    return value


class _Step(NamedTuple):
    """An action as a call: on the values of the edges that it takes, for those of the edges that it gives."""

    action: Action
    call: Callable[..., Any]
    takes: Sequence[_Edge] = ()
    gives: Sequence[_Edge] = ()


class Rank:
    """One rank of a program over its stages: what its actions come to, and the values that wait between them.

    pair: the program's micro-batch that is run as one of a stream is.
    """

    def __init__(
        self,
        index: int,
        program: Program,
        stages: Mapping[int, StageLike],
        transport: Transport,
        pair: Callable[[int], int] = lambda microbatch: microbatch,
    ) -> None:
        self.index = index
        self.stages = stages
        self._edges: dict[_Ends, _Edge] = {}  # of bound actions: those whose other end is not bound yet
        self._graph = program.graph
        self._pair = pair
        self._transport = transport
        whole = program.orders[index] if index < program.num_ranks else ()  # also what runs in another part
        self._split = {(action.stage, action.microbatch) for action in whole if action.kind is Kind.I}
        self._recomputed = {(action.stage, action.microbatch) for action in whole if action.kind is Kind.R}
        self._bound: tuple[Sequence[Action], list[_Step]] = ((), [])

    def bind(self, order: Sequence[Action]) -> list[_Step]:
        """The steps of an order; the same ones as long as it is the same order."""
        if self._bound[0] is not order:
            self._bound = order, [_BINDERS[action.kind](self, action) for action in order]
        return self._bound[1]

    def _edge(self, *ends: Any) -> _Edge:
        """The same one for the action that gives the value and for the one that takes it."""
        known = self._edges.pop(ends, None)
        if known is None:
            known = self._edges[ends] = _Edge(ends[0])
        return known

    def _forward(self, action: Action) -> _Step:
        stage, _, microbatch, _ = action
        pair = stage, self._pair(microbatch)
        split = pair in self._split
        checkpointed = pair in self._recomputed
        call = partial(self.stages[stage].forward, microbatch, split=split, checkpointed=checkpointed)
        takes = [self._edge(producer, stage, False, microbatch) for producer in self._graph.producers[stage]]
        gives = [self._edge(stage, consumer, False, microbatch) for consumer in self._graph.consumers[stage]]
        return _Step(action, call, takes, gives)

    def _recompute(self, action: Action) -> _Step:
        split = (action.stage, self._pair(action.microbatch)) in self._split
        return _Step(action, partial(self.stages[action.stage].recompute, action.microbatch, split=split))

    def _backward(self, action: Action) -> _Step:
        stage, kind, microbatch, _ = action
        run = self.stages[stage].backward if kind is Kind.B else self.stages[stage].input_grad
        takes = [self._edge(consumer, stage, True, microbatch) for consumer in self._graph.consumers[stage]]
        gives = [self._edge(stage, producer, True, microbatch) for producer in self._graph.producers[stage]]
        return _Step(action, partial(run, microbatch), takes, gives)

    def _weight_grad(self, action: Action) -> _Step:
        return _Step(action, partial(self.stages[action.stage].weight_grad, action.microbatch))

    def _copy(self, action: Action) -> _Step:
        stage = self.stages[action.stage]
        copies = {Kind.OFFLOAD: stage.offload, Kind.FREE: stage.free, Kind.FETCH: stage.fetch}
        return _Step(action, partial(copies[action.kind], action.microbatch))

    def _update(self, action: Action) -> _Step:
        return _Step(action, partial(self.stages[action.stage].update, action.microbatch))

    def _send(self, action: Action) -> _Step:
        edge = self._edge(action.stage, _peer(action), action.kind is Kind.SEND_B, action.microbatch)
        return _Step(action, self._transport.sender(action), takes=[edge])

    def _receive(self, action: Action) -> _Step:
        edge = self._edge(_peer(action), action.stage, action.kind is Kind.RECV_B, action.microbatch)
        return _Step(action, self._transport.receiver(action), gives=[edge])


_BINDERS: dict[Kind, Callable[[Rank, Action], _Step]] = {
    Kind.F: Rank._forward,
    Kind.B: Rank._backward,
    Kind.I: Rank._backward,
    Kind.W: Rank._weight_grad,
    Kind.R: Rank._recompute,
    Kind.UPDATE: Rank._update,
    Kind.OFFLOAD: Rank._copy,
    Kind.FREE: Rank._copy,
    Kind.FETCH: Rank._copy,
    Kind.SEND_F: Rank._send,
    Kind.SEND_B: Rank._send,
    Kind.RECV_F: Rank._receive,
    Kind.RECV_B: Rank._receive,
}


def _peer(action: Action) -> int:
    if action.peer is None:
        raise ExecutionError(f"{action} says no stage at its other end; lower the program, which names it")
    return action.peer


def interpret(rank: Rank, timer: _Timer, stamps: Stamps) -> Iterator[Action]:
    """Run an order of a rank. Yields each action before it runs: the executor resumes when it may.

    An exception of an action is passed on with a note that says where it happened.
    """
    now = timer.now
    order, starts, ends = stamps
    for position, (action, call, takes, gives) in enumerate(rank.bind(order)):
        yield action
        starts[position] = now()
        try:
            value = call(*map(_taken, takes))
        except BaseException as error:
            what = "update" if action.kind is Kind.UPDATE else "micro-batch"
            error.add_note(
                f"in {action} (stage {action.stage}, {what} {action.microbatch}), "
                f"rank {rank.index}, position {position} of its order"
            )
            raise
        if type(value) is PerConsumer:
            for edge, part in zip(gives, value, strict=True):
                edge.value = part
            part = None
        else:
            for edge in gives:
                edge.value = value
        value = None  # an output, or a part of it, lives no longer than somebody needs it
        ends[position] = now()
