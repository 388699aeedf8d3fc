"""Fake executor: runs a program on stages that compute nothing, on a virtual clock or with sleeps.

The code that runs programs on real stages also runs the program on fake stages. With a virtual clock, the run uses one
thread and takes only milliseconds. If the program was not validated, the run raises an error for a deadlock, for
missing or repeated work, and for a message to the wrong action.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from pipesched.errors import DeadlockError, ExecutionError
from pipesched.program.actions import Action, Kind, Queue
from pipesched.program.lowering import lower
from pipesched.program.program import Program
from pipesched.program.redundancy import REDUNDANT
from pipesched.program.validation import WORK, check_routes
from pipesched.runtime.executors.interpreter import BoundRank, Stamps, interpret
from pipesched.simulation.costs import Costs
from pipesched.simulation.trace import Span, Trace
from pipesched.tensors.payload import PerConsumer
from pipesched.units import counted

__all__ = ["FakeStage", "run_virtual"]


class _VirtualClock:
    """The virtual clock of one rank."""

    has_streams = False

    def __init__(self) -> None:
        self.time_s: float = 0
        self._copied: dict[Queue | None, float] = {}  # queue of copies -> end time of its last copy

    def now(self) -> float:
        """Return the current time in seconds."""
        return self.time_s

    def pass_time(self, seconds: float) -> None:
        """Advance the clock by the time of a computation."""
        self.time_s += seconds

    def copy(self, kind: Kind, seconds: float) -> float:
        """Start a copy once earlier copies of its queue have ended. Return the time at which the new copy ends."""
        return self.queued(kind, seconds)[1]

    def queued(self, kind: Kind, seconds: float, earliest_s: float = 0) -> tuple[float, float]:
        """Start an action once earlier actions of its queue have ended. Return its start and its end."""
        queue = kind.row.queue
        start_s = max(self.now(), earliest_s, self._copied.get(queue, 0))
        self._copied[queue] = start_s + seconds
        return start_s, self._copied[queue]

    def reach(self, moment_s: float) -> None:
        """Wait until this time. Has no effect if the time is in the past."""
        self.time_s = max(self.time_s, moment_s)


class _HostClock(_VirtualClock):
    """The wall clock of the host. A stage waits by sleeping."""

    def now(self) -> float:
        return time.perf_counter()

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    def reach(self, moment_s: float) -> None:
        time.sleep(max(0, moment_s - self.now()))


class FakeStage:
    """A stage for tests that computes nothing, but checks the order of actions. The costs give the time of each action.

    A FakeStage has the methods of a real stage, one for each kind of action. For a kind without a method here, it only
    checks that each action runs once. An action that a rank only starts needs a method.

    Args:
        index: the stage's number.
        costs: the times of the stage's actions, in seconds.
        clock: the virtual clock of the stage's rank. Default: None (the stage sleeps for the time of each action).
        versions: the weight version that each micro-batch uses. Default: () (always the newest version).
        redundancy: runs the MIRRORs, KEEPs and REPLAYs of all stages on their ranks' clocks. Default: None (they end
            immediately).

    """

    def __init__(
        self,
        index: int,
        costs: Costs,
        clock: _VirtualClock | None = None,
        versions: Sequence[int] = (),
        redundancy: "_FakeRedundancy | None" = None,
    ) -> None:
        self.index = index
        self._costs = costs
        self._clock = clock or _HostClock()
        self._copied: dict[int, float] = {}
        self._state: dict[int, list[Kind]] = {}
        self._num_producers = 0
        self._versions = versions
        self._gradients: list[int] = []
        self._reduced: dict[int, tuple[float, float]] = {}
        self._gathers: dict[int, tuple[float, float]] = {}
        self._redundancy = redundancy
        self._redundant: dict[Kind, dict[int, tuple[float, float]]] = {kind: {} for kind in REDUNDANT}
        self.updates: list[list[int]] = []  # the micro-batches of each update

    def forward(self, microbatch: int, *arrived: Any, split: bool, checkpointed: bool) -> Action:
        """Run F (the forward). Returns the action as the output, so that the receiver can check the message."""
        if self._versions and microbatch >= len(self._versions):
            raise ExecutionError(
                f"every micro-batch must have a weight version; stage {self.index} has versions for "
                f"{len(self._versions)} micro-batches, but none for micro-batch {microbatch}; pass a version for each "
                f"micro-batch"
            )
        if self._versions and self._versions[microbatch] > len(self.updates):
            raise ExecutionError(
                f"a micro-batch must use a weight version that exists; micro-batch {microbatch} uses version "
                f"{self._versions[microbatch]} of stage {self.index}, but the stage's newest version is "
                f"{len(self.updates)}; move the forward after the update"
            )
        self._run(Kind.F, microbatch, after=())
        self._check(arrived, Kind.F, microbatch)
        self._num_producers = len(arrived)
        return Action(self.index, Kind.F, microbatch)

    def recompute(self, microbatch: int, *, split: bool) -> None:
        """Run R (recompute)."""
        self._run(Kind.R, microbatch, after=(Kind.F,))

    def backward(self, microbatch: int, *grads: Any) -> PerConsumer:
        """Run B (the whole backward)."""
        self._wait_for_copy(microbatch)
        self._run(Kind.B, microbatch, after=(Kind.F,))
        self._gradients.append(microbatch)
        self._check(grads, Kind.B, microbatch)
        return PerConsumer([Action(self.index, Kind.B, microbatch)] * self._num_producers)

    def input_grad(self, microbatch: int, *grads: Any) -> PerConsumer:
        """Run I (the input gradient)."""
        self._wait_for_copy(microbatch)
        self._run(Kind.I, microbatch, after=(Kind.F,))
        self._check(grads, Kind.B, microbatch)
        return PerConsumer([Action(self.index, Kind.B, microbatch)] * self._num_producers)

    def weight_grad(self, microbatch: int) -> None:
        """Run W (the weight gradient)."""
        self._run(Kind.W, microbatch, after=(Kind.F, Kind.I))
        self._gradients.append(microbatch)

    def offload(self, microbatch: int) -> None:
        """Start the copy to the host (OFFLOAD)."""
        self._begin_copy(Kind.OFFLOAD, microbatch, after=Kind.F)

    def free(self, microbatch: int) -> None:
        """Run FREE (free the offloaded activations) once the copy that OFFLOAD started has ended."""
        action = self._note(Kind.FREE, microbatch, (Kind.OFFLOAD,))
        self._clock.reach(self._copied[microbatch])
        self._pass(action)

    def fetch(self, microbatch: int) -> None:
        """Start the copy back to the device (FETCH)."""
        self._begin_copy(Kind.FETCH, microbatch, after=Kind.FREE)

    def _begin_copy(self, kind: Kind, microbatch: int, after: Kind) -> None:
        action = self._note(kind, microbatch, (after,))
        self._copied[microbatch] = self._clock.copy(kind, self._costs.seconds(action))

    def _wait_for_copy(self, microbatch: int) -> None:
        done = self._state.get(microbatch, ())
        if Kind.OFFLOAD in done and Kind.FETCH not in done:
            raise ExecutionError(
                f"offloaded activations must be fetched before the backward; stage {self.index} has not fetched the "
                f"activations of micro-batch {microbatch}; add a fetch before its backward"
            )
        self._clock.reach(self._copied.pop(microbatch, self._clock.now()))

    def reduce(self, bucket: int) -> None:
        """Run REDUCE (start a sum over replicas). The sum ends immediately."""
        action = Action(self.index, Kind.REDUCE, bucket)
        if not self._gradients or bucket in self._reduced:
            raise ExecutionError(f"{action} must run once for each update, after a backward; correct the order")
        self._reduced[bucket] = self._clock.now(), self._clock.now()

    def last_backward(self, microbatch: int, *grads: Any) -> PerConsumer:
        """Run the stage's last B, in the same way as any other B."""
        return self.backward(microbatch, *grads)

    def reduced(self) -> Mapping[int, tuple[float, float]]:
        """Return (start, end) of each bucket's reduction over replicas, keyed by bucket."""
        return self._reduced

    def unshard(self, number: int) -> None:
        """Run UNSHARD (start to gather the weights). The gather ends immediately."""
        self._gathers[number] = self._clock.now(), self._clock.now()

    def await_weights(self) -> None:
        """Return immediately, because the weights have already arrived."""

    def reshard(self, number: int, *, last: bool) -> None:
        """Run RESHARD (free the weights)."""
        self._pass(Action(self.index, Kind.RESHARD, number))

    def gathered(self) -> Mapping[int, tuple[float, float]]:
        """Return (start, end) of each gather, keyed by number."""
        return self._gathers

    def mirror(self, number: int) -> None:
        """Run MIRROR (start to send gradients to the copy)."""
        self._begin_redundant(Kind.MIRROR, number)

    def mirrored(self) -> Mapping[int, tuple[float, float]]:
        """Return (start, end) of each MIRROR, keyed by number."""
        return self._redundant[Kind.MIRROR]

    def keep(self, number: int) -> None:
        """Run KEEP (start to set the state aside)."""
        self._begin_redundant(Kind.KEEP, number)

    def kept(self) -> Mapping[int, tuple[float, float]]:
        """Wait for the KEEPs. Return (start, end) of each, keyed by number."""
        for _, end_s in self._redundant[Kind.KEEP].values():
            self._clock.reach(end_s)
        return self._redundant[Kind.KEEP]

    def replay(self, number: int) -> None:
        """Run REPLAY (start an update of the copy)."""
        self._begin_redundant(Kind.REPLAY, number)

    def replayed(self) -> Mapping[int, tuple[float, float]]:
        """Return (start, end) of each REPLAY, keyed by number."""
        return self._redundant[Kind.REPLAY]

    def _begin_redundant(self, kind: Kind, number: int) -> None:
        action = Action(self.index, kind, number)
        if number in self._redundant[kind]:
            raise ExecutionError(f"{action} must run once in a step; it would run twice; remove the duplicate")
        now = self._clock.now()
        self._redundant[kind][number] = (now, now) if self._redundancy is None else self._redundancy.begin(action)

    def norm(self, number: int) -> Action:
        """Run NORM (measure the gradients). Returns the action instead of norms."""
        action = Action(self.index, Kind.NORM, number)
        if number != len(self.updates) or not self._gradients:
            raise ExecutionError(
                f"each NORM must measure the gradients that the next update applies; {action} was "
                f"called, but update {len(self.updates)} is next, and it applies the gradients of "
                f"{counted(len(self._gradients), 'micro-batch')}; correct the order"
            )
        self._pass(action)
        return action

    def update(self, number: int, norms: Sequence[Action] = ()) -> None:
        """Run UPDATE (the optimizer step). Raises ExecutionError if the update is out of order or has no gradients."""
        action = Action(self.index, Kind.UPDATE, number)
        if number != len(self.updates):
            raise ExecutionError(
                f"updates must run in order; update {len(self.updates)} is next, but {action} was called; correct the "
                f"order"
            )
        if not self._gradients:
            raise ExecutionError(
                f"an update must have gradients to apply; {action} has none; move the update after a backward of its "
                f"stage"
            )
        self.updates.append(sorted(self._gradients))
        self._gradients.clear()
        self._reduced.clear()
        self._pass(action)

    def __getattr__(self, name: str) -> Callable[[int], None]:
        """Return a function that runs actions of a kind for whose handler this class has no method."""
        for kind in Kind:
            if kind.row.handler == name and kind.row.transfer is None:
                if kind.row.queue is not None:
                    raise ExecutionError(
                        f"the fake executor must have a method for actions that a rank only starts; FakeStage has no "
                        f"{name}() for {kind}; write one in testing/fake_executor.py, as for offload() or reduce()"
                    )
                return lambda number: self._run(kind, number, after=())
        raise AttributeError(name)

    def _run(self, kind: Kind, microbatch: int, after: tuple[Kind, ...]) -> None:
        self._pass(self._note(kind, microbatch, after))

    def _note(self, kind: Kind, microbatch: int, after: tuple[Kind, ...]) -> Action:
        done = self._state.setdefault(microbatch, [])
        action = Action(self.index, kind, microbatch)
        if kind in done or (kind in (Kind.B, Kind.I) and (Kind.B in done or Kind.I in done)):
            raise ExecutionError(
                f"the work of a micro-batch must be done once; {action} would be done twice; done so far: "
                f"{_names(done)}; remove the duplicate"
            )
        if not all(need in done for need in after):
            raise ExecutionError(
                f"an action must run after the actions whose results it uses; {action} needs {_names(after)} before "
                f"it; done so far: {_names(done)}; move {action} to a later position"
            )
        done.append(kind)
        return action

    def _pass(self, action: Action) -> None:
        self._clock.pass_time(self._costs.seconds(action))

    def _check(self, values: tuple[Any, ...], kind: Kind, microbatch: int) -> None:
        wrong = [value for value in values if value.kind is not kind or value.microbatch != microbatch]
        if wrong:
            raise ExecutionError(
                f"an action must receive the messages of its own micro-batch; stage {self.index} received {wrong[0]} "
                f"for micro-batch {microbatch}; correct the messages of the program"
            )

    def missing(self, program: Program) -> Iterator[str]:
        """Yield a message for each micro-batch for which the stage has not done all its work."""
        whole = ({Kind.F},) if program.forward_only else ({Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W})
        for microbatch, visits in enumerate(program.visits[self.index].tolist()):
            done = set(self._state.get(microbatch, ())) & {*WORK}
            if done not in (whole if visits else (set(),)):
                yield f"stage {self.index} has done {_names(done)} for micro-batch {microbatch}"
        if self._gradients and program.has_updates:
            yield f"stage {self.index} has not applied the gradients of micro-batch {self._gradients[0]}"


class _FakeRedundancy:
    """Runs the MIRRORs, KEEPs and REPLAYs of all ranks in virtual time."""

    def __init__(self, program: Program, clocks: Sequence[_VirtualClock], costs: Costs) -> None:
        self._program = program
        self._clocks = clocks
        self._costs = costs
        self._missing = set(program.columns.stage[program.columns.are(Kind.MIRROR)].tolist())
        self._arrivals: dict[int, float] = {}  # stage -> the time at which its gradients have reached the copy

    def can_begin(self, action: Action) -> bool:
        """Return whether the MIRRORs that an action needs have started, so that its times are known."""
        if action.kind is Kind.REPLAY:
            return action.stage not in self._missing
        return action.kind is not Kind.KEEP or not self._missing

    def begin(self, action: Action) -> tuple[float, float]:
        """Start an action on its rank. Return its start and its end."""
        stage, kind, _, _ = action
        home, copy = self._program.placement[stage], self._program.copy_ranks[stage]
        seconds = self._costs.seconds(action)
        if kind is Kind.MIRROR:
            links = self._costs.links
            travel_s = 0 if links is None else links.link(home, copy).time_s(self._costs.gradient_bytes[stage])
            span = self._clocks[home].queued(kind, seconds + self._costs.transfer_s + travel_s)
            self._arrivals[stage] = span[1]
            self._missing.discard(stage)
            return span
        if kind is Kind.REPLAY:
            return self._clocks[copy].queued(kind, seconds, self._arrivals[stage])
        known = (self._known(one, home) for one in self._arrivals)
        return self._clocks[home].queued(kind, seconds, max(known, default=0))

    def _known(self, stage: int, rank: int) -> float:
        """Return the time at which a rank knows that the gradients of a stage have arrived."""
        copy = self._program.copy_ranks[stage]
        if copy == rank:
            return self._arrivals[stage]
        latency_s = 0 if self._costs.links is None else self._costs.links.link(copy, rank).latency_s
        return self._arrivals[stage] + self._costs.transfer_s + latency_s


def _names(kinds: Any) -> str:
    return ", ".join(sorted(kinds)) or "nothing"


class _Mail:
    """Message transport in virtual time. Each message carries its arrival time."""

    def __init__(
        self, program: Program, clocks: list[_VirtualClock], costs: Costs, redundancy: _FakeRedundancy
    ) -> None:
        self._placement = program.placement
        self._redundancy = redundancy
        self._clocks = clocks
        self._costs = costs
        self._free: dict[tuple[int, int], float] = {}  # link -> time at which the link becomes free
        self._channels: dict[tuple[int, int, bool], deque[tuple[float, Any]]] = {}
        self._norms: dict[int, list[tuple[float, list[Any]]]] = {}  # rank -> (send time, norms) for each update

    def _channel(self, giver: int, taker: int, forward: bool) -> deque[tuple[float, Any]]:
        key = self._placement[giver], self._placement[taker], forward
        return self._channels.setdefault(key, deque())

    def _incoming(self, action: Action) -> deque[tuple[float, Any]]:
        return self._channel(action.peer or 0, action.stage, action.kind is Kind.RECV_F)

    def has_arrived(self, action: Action) -> bool:
        """Return whether the action can start, because the messages or the norms that it needs have been sent."""
        if action.kind in REDUNDANT:
            return self._redundancy.can_begin(action)
        if action.kind is Kind.UPDATE:
            return all(len(sent) > action.microbatch for sent in self._norms.values())
        return action.kind not in (Kind.RECV_F, Kind.RECV_B) or bool(self._incoming(action))

    def sender(self, action: Action) -> Callable[[Any], None]:
        """Return the function that sends the message of this action."""
        channel = self._channel(action.stage, action.peer or 0, action.kind is Kind.SEND_F)
        return lambda value: channel.append((self._arrival(action) + self._costs.transfer_s, value))

    def _arrival(self, action: Action) -> float:
        """Return the arrival time of a message that is sent now, excluding ``transfer_s``."""
        ends = self._placement[action.stage], self._placement[action.peer or 0]
        start = self._clocks[ends[0]].now()
        links = self._costs.links
        if links is None:
            return start
        producer = action.stage if action.kind is Kind.SEND_F else action.peer or 0
        if links.contended:
            start = max(start, self._free.get(ends, start))
        link = links.link(*ends)
        self._free[ends] = start + self._costs.output_bytes[producer] * link.byte_s
        return self._free[ends] + link.latency_s

    def exchange(self, rank: int) -> tuple[Callable[[list[Any]], None], Callable[[], list[Any]]]:
        """Return a function that sends a list to all other ranks, and a function that waits for their lists."""
        own = self._norms.setdefault(rank, [])
        clock = self._clocks[rank]
        links = self._costs.links
        updates = count()

        def receive() -> list[Any]:
            number = next(updates)
            sent = {other: lists[number] for other, lists in self._norms.items() if other != rank}
            for other, (sent_s, _) in sent.items():
                latency_s = 0 if links is None else links.link(other, rank).latency_s
                clock.reach(sent_s + self._costs.transfer_s + latency_s)
            return [value for _, values in sent.values() for value in values]

        return lambda values: own.append((clock.now(), values)), receive

    def receiver(self, action: Action) -> Callable[[], Any]:
        """Return a function that waits for the next message for this action and returns its content."""
        channel = self._incoming(action)
        clock = self._clocks[self._placement[action.stage]]

        def receive() -> Any:
            arrival, value = channel.popleft()
            clock.reach(arrival)
            return value

        return receive


def run_virtual(program: Program, costs: Costs | None = None) -> Trace:
    """Run a program with fake stages on a virtual clock. The program is lowered first if necessary.

    Only placement and routes are validated beforehand.

    Args:
        program: the program.
        costs: the times of the program's actions. Default: unit costs.

    Raises:
        ScheduleError: a stage has no rank, or a route is invalid.
        DeadlockError: ranks wait forever.
        ExecutionError: work is missing, done twice, or done before the work that it needs.

    """
    costs = costs or Costs.uniform(program.num_stages)
    check_routes(program)
    lowered = lower(program)
    clocks = [_VirtualClock() for _ in range(program.num_ranks)]
    versions = program.versions or ((),) * program.num_stages
    redundancy = _FakeRedundancy(lowered, clocks, costs)
    stages = {s: FakeStage(s, costs, clocks[rank], versions[s], redundancy) for s, rank in enumerate(program.placement)}
    mail = _Mail(lowered, clocks, costs, redundancy)
    ranks = [BoundRank(rank, lowered, stages, mail) for rank in range(program.num_ranks)]
    stamps = [Stamps.room_for(order) for order in lowered.orders]
    _drive([interpret(*one) for one in zip(ranks, clocks, stamps, strict=True)], mail)
    for bound, own in zip(ranks, stamps, strict=True):
        bound.finish(own)
    missing = [text for stage in stages.values() for text in stage.missing(program)]
    if missing:
        raise ExecutionError(
            f"a program must do all the work of each micro-batch; at the end of this program, {missing[0]}; correct "
            f"its actions"
        )
    for index, stage in stages.items():
        if not program.routes and stage.updates != stages[0].updates:
            raise ExecutionError(
                f"the updates of all stages must apply the gradients of the same micro-batches; stages 0 and {index} "
                f"differ; move the updates"
            )
    spans = tuple(
        Span(action, rank, start, end, action.lane)
        for rank, own in enumerate(stamps)
        for action, start, end in zip(*own, strict=True)
    )
    return Trace(spans, program.num_ranks, program.name, costs)


def _drive(ranks: list[Iterator[Action]], mail: _Mail) -> None:
    """Resume the ranks in turn until all have finished or none can continue."""
    at = [next(loop, None) for loop in ranks]
    while any(action is not None for action in at):
        moved = False
        for index, loop in enumerate(ranks):
            while (action := at[index]) is not None and mail.has_arrived(action):
                at[index] = next(loop, None)
                moved = True
        if not moved:
            waits = ", ".join(f"rank {index} at {action}" for index, action in enumerate(at) if action is not None)
            raise DeadlockError(
                f"at least one rank must be able to continue; every unfinished rank waits (deadlock): {waits}; "
                f"validate the program to see the cycle"
            )
