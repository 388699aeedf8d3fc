"""Interpreter: the loop that runs the actions of one rank, shared by all executors.

A rank binds its order once. Binding turns each action into a call with a known stage, micro-batch and channel, and with
the edges that the action reads and writes. An edge stores the output of one action until another action consumes it.
If the consuming stage is on another rank, a send consumes the output. The loop then only makes the bound calls.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch.profiler import record_function

from pipesched.errors import ExecutionError
from pipesched.program.actions import BACKWARD_MESSAGES, Action, At, Kind
from pipesched.program.dependencies import WEIGHT_USES
from pipesched.program.program import Program
from pipesched.program.reductions import early_stages, last_gradients
from pipesched.tensors.payload import PerConsumer
from pipesched.tensors.torch_insides import is_profiled

__all__ = ["BoundRank", "StageLike", "Stamps", "Transport", "interpret"]


class StageLike(Protocol):
    """The methods of a stage that the actions call.

    The row of a kind names the method that runs its actions (`KindRow.handler`). A handler that is not listed here is a
    method that gets only the number of the action, and returns nothing. `KindRow.spans` names methods that wait for the
    stage's started actions of a kind, and return the start and the end of each, keyed by the number of the action.

    ``arrived`` contains a value from each producing stage, and ``grads`` a gradient from each consuming stage.
    ``split`` states whether the micro-batch's backward is split into I and W, and ``checkpointed`` whether R recomputes
    the micro-batch's activations.
    """

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Any:
        """F: return the stage's output, or a PerConsumer with one output for each consuming stage."""

    def recompute(self, microbatch: int, *, split: bool) -> None:
        """R: run F again and keep the activations."""

    def backward(self, microbatch: int, *grads: Any) -> PerConsumer:
        """B: return a gradient for each producing stage, and accumulate the weight gradients."""

    def last_backward(self, microbatch: int, *grads: Any) -> PerConsumer:
        """B: run the stage's last backward; start each reduction as soon as its gradients are complete."""

    def input_grad(self, microbatch: int, *grads: Any) -> PerConsumer:
        """I: return a gradient for each producing stage."""

    def unshard(self, number: int) -> None:
        """UNSHARD: start gathering weights that are split across replicas."""

    def await_weights(self) -> None:
        """Wait for the weights that the last UNSHARD gathers. Called before the first action that uses the weights."""

    def reshard(self, number: int, *, last: bool) -> None:
        """RESHARD: free the gathered weights. ``last`` states whether this is the stage's last RESHARD in the step."""

    def norm(self, number: int) -> Any:
        """NORM: return the norms of the gradients accumulated since the last update."""

    def update(self, number: int, norms: Sequence[Any] = ()) -> None:
        """UPDATE: step the optimizer with the gradients accumulated since the last update.

        ``norms`` holds the gradient norms of all stages if the program has NORM actions.
        """


class Transport(Protocol):
    """Transports values between ranks.

    Values with the same sender, receiver and kind of send are first in, first out.
    """

    def sender(self, action: Action) -> Callable[[Any], None]:
        """Return a function that sends this action's value without waiting for the receiver."""

    def receiver(self, action: Action) -> Callable[[], Any]:
        """Return a function that waits for this action's value and returns the value on this rank's device."""

    def exchange(self, rank: int) -> tuple[Callable[[list[Any]], None], Callable[[], list[Any]]]:
        """Return two functions: one sends a list to all other ranks, the other receives and joins their lists."""


class _Timer(Protocol):
    """The clock that stamps the starts and ends of actions."""

    #: Whether the device has streams. If so, an action starts where the rank's previous action ends.
    has_streams: bool

    def now(self) -> Any:
        """Return the current time: seconds (float) on a CPU, otherwise an event to read after the step."""


class Stamps(NamedTuple):
    """The start and end time stamps of each action in an order; None for an action that has not run."""

    order: Sequence[Action]
    starts: list[Any]
    ends: list[Any]

    @classmethod
    def room_for(cls, order: Sequence[Action]) -> "Stamps":
        """Return empty stamps for an order."""
        return cls(order, [None] * len(order), [None] * len(order))


_COLLECTIVES = tuple(kind for kind in Kind if kind.row.spans)

#: The key of an edge: the producing stage, the consuming stage, whether the edge is backward, and the micro-batch.
_Ends = tuple[int, int, bool, int]


class _Edge:
    """Stores the output of an action until another action consumes it. ``giver`` is the producing stage."""

    __slots__ = ("giver", "value")

    def __init__(self, giver: int) -> None:
        self.giver = giver
        self.value: Any = _NOTHING


class _Nothing:
    """Marks an edge without a value."""


_NOTHING = _Nothing()


def _in_range(action: Action, call: Callable[..., Any], takes: Sequence[_Edge]) -> Any:
    """Make a call within a range of torch's profiler that is named like the action."""
    with record_function(str(action)):
        return call(*map(_taken, takes))


def _taken(edge: _Edge) -> Any:
    value = edge.value
    edge.value = _NOTHING
    if value is _NOTHING:
        raise ExecutionError(
            f"an action must run after its inputs have arrived; the value from stage {edge.giver} has not arrived; "
            f"check the order with pipesched.validate(program)"
        )
    return value


class _BoundAction(NamedTuple):
    """The call that runs an action. The edges ``takes`` supply the arguments; the edges ``gives`` store the result.

    ``wait`` is called before the action starts. ``wait`` is None unless the action needs results of collectives or
    norms from other ranks. Such values do not pass through edges.
    """

    action: Action
    call: Callable[..., Any]
    takes: Sequence[_Edge] = ()
    gives: Sequence[_Edge] = ()
    wait: Callable[[], Any] | None = None


class _Norms:
    """Exchanges gradient norms between ranks.

    This rank sends the norms of all its stages together. Before an update, this rank receives the norms of the other
    ranks.

    Args:
        count: the number of this rank's stages.
        send: sends this rank's norms to the other ranks.
        receive: waits for the norms of the other ranks.

    """

    def __init__(self, count: int, send: Callable[[list[Any]], None], receive: Callable[[], list[Any]]) -> None:
        self._count = count
        self._send = send
        self._receive = receive
        self._own: list[Any] = []
        self.all: list[Any] = []

    def add(self, value: Any) -> None:
        """Add the norms of one stage. After the last stage of this rank, send the norms of all its stages."""
        self.all = []
        self._own.append(value)
        if len(self._own) == self._count:
            self._send(self._own)

    def wait(self) -> None:
        """Wait for the norms of all stages of the other ranks."""
        if self._own:
            self.all = [*self._own, *self._receive()]
            self._own = []


class BoundRank:
    """One rank of a program, bound to its stages. Stores the calls of the rank's actions and their edges.

    Args:
        index: the number of the rank.
        program: the lowered program.
        stages: the stages, keyed by number; only the stages of this rank, and those whose copies it updates, are used.
        transport: sends values to other ranks and receives them.
        pair: maps each micro-batch of a stream to the program's micro-batch that has the same actions. Default: returns
            the micro-batch unchanged.

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
        self._edges: dict[_Ends, _Edge] = {}  # edges of which only one end has been bound
        self._graph = program.graph
        self._pair = pair
        self._transport = transport
        count = len(program.chunks(index)) if program.has_norms else 0
        self._norms = _Norms(count, *transport.exchange(index)) if count else None
        whole = program.orders[index] if index < program.num_ranks else ()  # bind() may receive only a part of it
        self._split = {(action.stage, action.microbatch) for action in whole if action.kind is Kind.I}
        self._recomputed = {(action.stage, action.microbatch) for action in whole if action.kind is Kind.R}
        stages_of = {kind: {action.stage for action in whole if action.kind is kind} for kind in _COLLECTIVES}
        #: For each kind with `KindRow.spans` that this rank runs, the stages that run it.
        self._collectives = {kind: stages for kind, stages in stages_of.items() if stages}
        #: For each stage, the number of its last gather.
        self._last_gathers = {action.stage: action.microbatch for action in whole if action.kind is Kind.UNSHARD}
        self._unawaited: set[int] = set()  # stages with a gather that no bound action waits for
        #: The last backward of each stage whose reductions start during that backward.
        self._last = {program.columns.action(int(last_gradients(program)[stage])) for stage in early_stages(program)}
        self._bound: tuple[Sequence[Action], list[_BoundAction]] = ((), [])

    def bind(self, order: Sequence[Action]) -> list[_BoundAction]:
        """Return the calls of an order's actions. Binding the same order object again returns the same list."""
        if self._bound[0] is not order:
            binder, other = _BINDERS.get, BoundRank._call
            self._bound = order, [binder(one.kind.row.handler, other)(self, one) for one in order]
        return self._bound[1]

    def _call(self, action: Action) -> _BoundAction:
        call = partial(getattr(self.stages[action.stage], action.kind.row.handler), action.microbatch)
        return _BoundAction(action, call, wait=self._wait(action))

    def _wait(self, action: Action) -> Callable[[], Any] | None:
        """Return a function that waits for the collectives that an action needs; None if no wait is needed."""
        if not self._collectives:
            return None
        stage, kind, _, _ = action
        own = self.stages[stage]
        kinds = [one for need in kind.row.needs if need.at is At.NUMBERED for one in need.kinds]
        waits = [getattr(own, one.row.spans) for one in kinds if one in self._collectives]
        if kind in WEIGHT_USES and stage in self._unawaited:
            self._unawaited.discard(stage)
            waits.append(own.await_weights)
        if len(waits) > 1:
            return lambda: [wait() for wait in waits]
        return waits[0] if waits else None

    def _edge(self, *ends: Any) -> _Edge:
        """Return the edge between two actions. The edge is created when the first of the two actions is bound."""
        known = self._edges.pop(ends, None)
        if known is None:
            known = self._edges[ends] = _Edge(ends[0])
        return known

    def _forward(self, action: Action) -> _BoundAction:
        stage, _, microbatch, _ = action
        pair = stage, self._pair(microbatch)
        split = pair in self._split
        checkpointed = pair in self._recomputed
        call = partial(self.stages[stage].forward, microbatch, split=split, checkpointed=checkpointed)
        takes = [self._edge(producer, stage, False, microbatch) for producer in self._graph.producers[stage]]
        gives = [self._edge(stage, consumer, False, microbatch) for consumer in self._graph.consumers[stage]]
        return _BoundAction(action, call, takes, gives, self._wait(action))

    def _recompute(self, action: Action) -> _BoundAction:
        stage, _, microbatch, _ = action
        split = (stage, self._pair(microbatch)) in self._split
        call = partial(self.stages[stage].recompute, microbatch, split=split)
        return _BoundAction(action, call, wait=self._wait(action))

    def _backward(self, action: Action) -> _BoundAction:
        stage, kind, microbatch, _ = action
        run = getattr(self.stages[stage], "last_backward" if action in self._last else kind.row.handler)
        takes = [self._edge(consumer, stage, True, microbatch) for consumer in self._graph.consumers[stage]]
        gives = [self._edge(stage, producer, True, microbatch) for producer in self._graph.producers[stage]]
        return _BoundAction(action, partial(run, microbatch), takes, gives, self._wait(action))

    def _unshard(self, action: Action) -> _BoundAction:
        self._unawaited.add(action.stage)
        return _BoundAction(action, partial(self.stages[action.stage].unshard, action.microbatch))

    def _reshard(self, action: Action) -> _BoundAction:
        stage, _, number, _ = action
        last = number == self._last_gathers[stage]
        return _BoundAction(action, partial(self.stages[stage].reshard, number, last=last))

    def finish(self, stamps: Stamps) -> None:
        """Wait for the collectives and the redundancy of an order, and record in ``stamps`` when they ran."""
        if not self._collectives:
            return
        spans = {
            (kind, stage): getattr(self.stages[stage], kind.row.spans)()
            for kind, stages in self._collectives.items()
            for stage in stages
        }
        for position, (stage, kind, number, _) in enumerate(stamps.order):
            span = spans.get((kind, stage), {}).get(number)
            if span is not None:
                stamps.starts[position], stamps.ends[position] = span

    def _norm(self, action: Action) -> _BoundAction:
        measure = partial(self.stages[action.stage].norm, action.microbatch)
        norms = self._norms
        call = measure if norms is None else lambda: norms.add(measure())
        return _BoundAction(action, call, wait=self._wait(action))

    def _update(self, action: Action) -> _BoundAction:
        update = partial(self.stages[action.stage].update, action.microbatch)
        norms = self._norms
        if norms is None:
            return _BoundAction(action, update, wait=self._wait(action))
        wait = norms.wait  # a NORM has waited for the stage's collectives, but not for its KEEP
        if action.stage in self._collectives.get(Kind.KEEP, ()):
            kept = getattr(self.stages[action.stage], Kind.KEEP.row.spans)
            return _BoundAction(action, lambda: update(norms.all), wait=lambda: (kept(), wait()))
        return _BoundAction(action, lambda: update(norms.all), wait=wait)

    def _send(self, action: Action) -> _BoundAction:
        edge = self._edge(action.stage, _peer(action), action.kind in BACKWARD_MESSAGES, action.microbatch)
        return _BoundAction(action, self._transport.sender(action), takes=[edge])

    def _receive(self, action: Action) -> _BoundAction:
        edge = self._edge(_peer(action), action.stage, action.kind in BACKWARD_MESSAGES, action.microbatch)
        return _BoundAction(action, self._transport.receiver(action), gives=[edge])


#: Binds the handlers that get more than the number of the action, or whose results go to other actions.
_BINDERS: dict[str, Callable[[BoundRank, Action], _BoundAction]] = {
    "forward": BoundRank._forward,
    "backward": BoundRank._backward,
    "input_grad": BoundRank._backward,
    "recompute": BoundRank._recompute,
    "unshard": BoundRank._unshard,
    "reshard": BoundRank._reshard,
    "norm": BoundRank._norm,
    "update": BoundRank._update,
    "send": BoundRank._send,
    "receive": BoundRank._receive,
}


def _peer(action: Action) -> int:
    if action.peer is None:
        raise ExecutionError(
            f"every send and receive must name the stage at its other end; {action} names no stage; pass the "
            f"program through lower() first"
        )
    return action.peer


def interpret(rank: BoundRank, timer: _Timer, stamps: Stamps) -> Iterator[Action]:
    """Run an order on a rank. Yields each action before running it, so that the executor can stop the rank.

    ``stamps`` supplies the order and records the time stamps of its actions. If an action raises an exception, a note
    that names the action and its position is added to the exception.
    """
    now = timer.now
    follows = timer.has_streams
    stamp = None
    order, starts, ends = stamps
    ranges = is_profiled()
    for position, (action, call, takes, gives, wait) in enumerate(rank.bind(order)):
        yield action
        try:
            if wait is not None:
                wait()
                stamp = None
            starts[position] = stamp if follows and stamp is not None else now()
            value = _in_range(action, call, takes) if ranges else call(*map(_taken, takes))
        except BaseException as error:
            error.add_note(
                f"in {action} (stage {action.stage}, {action.kind.row.number} {action.microbatch}), "
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
        value = None  # drop the references, so that an output lives no longer than its consumers need it
        ends[position] = stamp = now()
