"""Processes: runs one rank per process. The ranks exchange messages over sockets, gloo or NCCL.

Why a step cannot hang. The program is valid: its orders, its dependencies, and the edges from a channel's k-th
send to the channel's k-th receive form no cycle. A send copies its message and returns, so it never blocks its rank. A
receive takes the channel's next message. That is the right message, since both ends use the channel in the same order
and the channel is first in, first out. A receive does not depend on later messages, and is posted at the latest when
its action begins. So a rank waits only for a send that comes earlier in the program. Consider the first action, in a
topological order, that has not run. The rank of this action has run all earlier actions of its order, and any message
for which the action waits has been sent. So the action runs. A rank waits for its sends to complete only between two
runs; the matching receives then belong to the previous run.

Why a stream cannot hang. Each rank runs its order in parts, and all ranks have the same number of parts. No action
depends on a later part (``Segments`` proves this for each stream), and the concatenated parts are the orders of a valid
program. So the argument above holds for all actions up to the end of any part, regardless of later parts, and each rank
completes its part once the other ranks have begun theirs. A stream is one run: a message may be received in a later
part, and its sender does not wait for the receive between parts. The loss is broadcast at the end of a part. A rank
waits for the loss only after its own part: when the caller reads the loss, or before the rank shares the loss of the
next part.

The proof does not cover faults, such as a rank that raises an error, dies or blocks. After a fault, the other ranks
stop within seconds, or at the latest after ``timeout_s``.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn
from weakref import WeakMethod, finalize

import torch

from pipesched.errors import ExecutionError
from pipesched.model.agreement import Facts, differences
from pipesched.program.actions import Action, Kind, Lane
from pipesched.program.program import Program
from pipesched.runtime.coordination.forked_process import Forked, end_in_children, forget
from pipesched.runtime.coordination.interpreter_exit import EXIT
from pipesched.runtime.coordination.rank_activity import COLLECTIVE, Doing, doing_at, said
from pipesched.runtime.executors.channel_plan import ChannelEnds, OrderMessages, channels_of, digest_of
from pipesched.runtime.executors.device_streams import streams_for
from pipesched.runtime.executors.interpreter import Rank, Stamps, interpret
from pipesched.runtime.executors.rank_run import RankRun, RankTimeline
from pipesched.runtime.executors.threads import RunSpec, Stopped
from pipesched.runtime.rank_grid import RankGrid
from pipesched.runtime.transport.channels import SHARE, Channels
from pipesched.runtime.transport.clock_sync import clock_offset
from pipesched.runtime.transport.connections import MessageTransport, met, transport_for
from pipesched.runtime.transport.encoding import Encoding
from pipesched.runtime.transport.host_copies import Courier
from pipesched.runtime.transport.layout_book import digest
from pipesched.runtime.transport.message_layout import MessageLayout, describe
from pipesched.runtime.transport.ports import ConnectionLostError
from pipesched.runtime.transport.rank_exchange import DEALT, Exchange
from pipesched.runtime.transport.shared_value import Shared
from pipesched.simulation.trace import Span
from pipesched.tensors.caller_context import Caller, intra_op
from pipesched.tensors.payload import Payload

__all__ = ["ProcessExecutor"]

_LOG = logging.getLogger(__name__)

_IDENTITY = ("program", "batch", "number of earlier steps", "values")  # compared between ranks at the start of a run


class ProcessExecutor:
    """One rank of a pipeline in a separate process.

    The constructor is collective, and so are all methods that run steps or exchange values.

    After a failure, the executor is closed in all ranks.

    Args:
        group: a process group of the pipeline's ranks, in rank order. Only the group's store is used; ranks communicate
            over connections that the executor creates.
        grid: the arrangement of the group's ranks into replicas of the pipeline. Programs and exchanges run within each
            replica; comparisons, ``deal`` and the alarm include all ranks. ``grid.timeout_s`` must exceed the step time
            of the slowest rank.
        intra_op_threads: the number of CPU threads per operation on this rank.
        transport: creates the connections. Default: the transport for messages of this rank's device.
        encoding: encodes values other than tensors. Default: a new Encoding.

    Raises:
        ExecutionError: if a rank does not join within ``grid.timeout_s``.

    """

    def __init__(
        self,
        group: Any,
        grid: RankGrid,
        *,
        intra_op_threads: int = 1,
        transport: MessageTransport | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        assert grid.timeout_s is not None
        self.grid = grid
        self.rank = grid.rank
        self.num_ranks = grid.num_processes
        self.device = grid.all_devices[grid.position]
        self.timeout_s = grid.timeout_s
        self._group = group
        self._streams = streams_for(self.device)
        self._threads = intra_op_threads
        self._busy = threading.Lock()
        self._known: dict[int, tuple[Program, bytes]] = {}
        self._messages: dict[int, OrderMessages] = {}
        self._steps = 0
        self._shared: Shared | None = None
        self._fault: str | None = None
        self._wire: Channels | None = None
        self._forked = Forked()
        self._courier = Courier(self.device)
        #: Encodes values other than tensors; decodes only types that were registered.
        self.encoding = encoding or Encoding((Action, Kind, Lane, Span))
        self._transport = transport or transport_for(self.device)
        self._alarm, store = met(group, grid.names, self.timeout_s)
        self._activity = self._alarm.activity
        with self._stopping_all("the construction of a pipeline"):
            connections = self._transport.connect(store, self.rank, self.num_ranks, self.timeout_s)
            self._end_connections = finalize(self, connections.close)
            self._alarm.on_fault(connections.hang_up)
            self._links = connections.links
            self._wire = connections.channels(_IDENTITY, self.encoding)
        with self._one_at_a_time("the construction of a pipeline"):
            self._clock_s = clock_offset(connections.port, self.rank, self.num_ranks)
        end_in_children(self)
        if len(self.grid.rows) > 1:
            receive = WeakMethod(self._receive_last)
            at_exit = partial(_call, receive)
            atexit.register(at_exit)
            finalize(self, atexit.unregister, at_exit).atexit = False
        _LOG.info("rank %d of %d is connected", self.rank, self.num_ranks)

    def reconnected(self) -> "ProcessExecutor":
        """Return a new executor like this one, for example after ``close``. Collective."""
        return ProcessExecutor(
            self._group,
            self.grid,
            intra_op_threads=self._threads,
            transport=self._transport,
            encoding=self.encoding,
        )

    def start(self) -> None:
        """Do nothing: the rank is this thread of this process."""

    def with_devices(self, devices: Sequence[torch.device]) -> "ProcessExecutor":
        """Return this executor: a rank without stages still takes part in collective calls."""
        return self

    def end_in_child(self) -> None:
        """Disable the executor in a forked child process, without closing the connections of the parent process."""
        self._forked.here = True
        for end in (self._end_connections, self._courier.end):
            forget(end)

    def learn(self, value: Any) -> None:
        """Register the types that occur in a value, so that messages can contain them.

        Raises ExecutionError for a type that cannot be sent.
        """
        with self.encoding.learning():
            MessageLayout(describe(Payload.of(value), self.encoding)[0], self.encoding).written()

    @property
    def closed(self) -> bool:
        """Whether the executor is closed."""
        return self._wire is None or self._forked.here

    @property
    def busy(self) -> bool:
        """Whether a run or another call is in progress."""
        return self._busy.locked()

    # ---- running --------------------------------------------------------------------------------------------------

    def run(
        self,
        run_spec: RunSpec,
        *,
        grad: bool,
        caller: Caller | None = None,
        looks: Sequence[Hashable] = (),
        values: bytes = b"",
    ) -> RankTimeline:
        """Run this rank's part of a lowered program in this thread.

        Args:
            run_spec: the program, its stages and its hooks; only the stages of this rank are used.
            grad: whether grad mode is enabled.
            caller: the settings for layers that run in the program. Default: the settings of this thread.
            looks: the key of each micro-batch, as returned by ``look``. The executor predicts message layouts from the
                keys.
            values: a digest of the values of the batch, which all ranks must have. Default: not compared.

        Raises:
            ExecutionError: if another rank failed (the message names that rank), if ranks run different programs or
                steps, and after ``close``. An exception of a stage of this rank is raised unchanged, with a note that
                names the action.

        """
        with self._one_at_a_time("a step"):
            failed = True
            try:
                timeline = self._run(run_spec, caller or self.caller(grad=grad), looks, values)
                failed = False
            except BaseException as error:
                self._activity.fail(*_account(error))
                raise
            finally:
                run_spec.finish(failed)
            return timeline

    def _run(self, run_spec: RunSpec, caller: Caller, looks: Sequence[Hashable], values: bytes) -> RankTimeline:
        program = run_spec.program
        wire = self._open_wire()
        order = self._own_order(program.orders if run_spec.orders is None else run_spec.orders)
        messages = self._messages_of(program, order)
        keys, batch, shapes = messages.keys(looks, caller.grad)
        step = digest(b"%d %s" % (self._steps, self._activity.method.encode()))
        wire.open(keys, self._agreed(program) + batch + step + digest(values), shapes)
        self._steps += 1
        run_spec.prepare(caller)
        start_s = time.perf_counter()
        self._streams.begin()
        try:
            return self._run_order(self._rank_of(run_spec, messages), order, caller, start_s, program)
        finally:
            self._streams.end()

    def _own_order(self, orders: Sequence[tuple[Action, ...]]) -> tuple[Action, ...]:
        """Return the order of this rank; empty if the rank holds no stages."""
        position = self.grid.position
        return orders[position] if position < len(orders) else ()

    def caller(self, *, grad: bool) -> Caller:
        """Return the inference mode and the autocast settings of this thread, with ``grad`` as the grad mode."""
        return Caller.here({self.device.type}, grad=grad)

    def begin(self, run_spec: RunSpec, caller: Caller, *, values: bytes = b"") -> RankRun:
        """Begin a run that receives the ranks' orders in several parts. No other run may begin before ``end``.

        ``values`` is a digest of the values of the first batch, which all ranks must have. Default: not compared.
        Raises the same errors as ``run``.
        """
        with self._one_at_a_time("the start of asynchronous steps"):
            program = run_spec.program
            wire = self._open_wire()
            channels = OrderMessages(program, self._own_order(program.orders), self.grid.pipeline).none
            try:
                step = digest(b"%d" % self._steps)
                wire.open(channels, self._agreed(program) + digest(b"stream") + step + digest(values))
                self._steps += 1
                run_spec.prepare(caller)
            except BaseException as error:
                self._activity.fail(*_account(error))
                run_spec.finish(True)
                raise
            ends_of_rank = ChannelEnds(program, wire, self.grid.pipeline)
            rank = Rank(self.grid.position, program, run_spec.stages, ends_of_rank, run_spec.pair)
            run = RankRun(run_spec, caller, rank, self.continue_run, self.leave)
            self._streams.begin()
            return run

    def continue_run(self, run: RankRun, order: tuple[Action, ...]) -> RankTimeline:
        """Run the next part of a stream, and return its timeline."""
        with self._one_at_a_time("a step"):
            run.failed = True
            messages = OrderMessages(run.run_spec.program, order, self.grid.pipeline)
            self._open_wire().extend(messages.repeated(run.run_spec.period))
            timeline = self._run_order(run.rank, order, run.caller, run.began_s, run.run_spec.program)
            run.failed = False
            return timeline

    def end(self, run: RankRun) -> None:
        """End a run that ``begin`` returned."""
        self._streams.end()
        run.run_spec.finish(run.failed)

    def check_outside(self, method: str) -> None:
        """Raise ExecutionError if a step is running. ``method`` is the method's name in the message."""
        self._forked.check()
        if self._busy.locked():
            raise ExecutionError(
                f"{method}() was called from inside a running step (by a layer or a hook); "
                f"call it after the step has returned"
            )

    def _run_order(
        self, rank: Rank, order: tuple[Action, ...], caller: Caller, start_s: float, program: Program
    ) -> RankTimeline:
        self._streams.follow()
        stamps = Stamps.room_for(order)
        grid = self.grid
        self._activity.run(stamps, [grid.pipeline[rank] for rank in program.placement])
        with intra_op(self._threads), caller.held(), self._streams.entered():
            if self._links is not None:
                self._links.begin()
            self._interpret(rank, stamps)
            rank.finish(stamps)
        size = len(grid.pipeline)
        all_stamps = [stamps if index == grid.position else Stamps.room_for(()) for index in range(size)]
        return RankTimeline(all_stamps, [self._streams.reader(start_s)] * size, start_s + self._clock_s)

    def _rank_of(self, run_spec: RunSpec, messages: OrderMessages) -> Rank:
        """Return the Rank for a run's stages.

        Later runs with the same stages reuse the Rank. If this run executes only a part of each rank's order, the Rank
        is not kept, because the next run then has different stages.
        """
        rank = messages.rank
        if rank is None or rank.stages is not run_spec.stages:
            ends = ChannelEnds(run_spec.program, self._open_wire(), self.grid.pipeline)
            rank = Rank(self.grid.position, run_spec.program, run_spec.stages, ends, run_spec.pair)
            messages.rank = rank if run_spec.orders is None else None
        return rank

    def now(self) -> Any:
        """Return the current time, on the clock of this executor's timelines."""
        return self._streams.now()

    def check_peers(self) -> None:
        """Raise Stopped if another rank has failed."""
        if self._alarm.bell.rung:
            raise Stopped

    def _interpret(self, rank: Rank, stamps: Stamps) -> None:
        bell = self._alarm.bell
        try:
            for _ in interpret(rank, self._streams, stamps):
                if bell.rung:
                    raise Stopped
        except RuntimeError as error:
            if isinstance(error.__cause__, StopIteration):  # the generator has wrapped a layer's StopIteration
                raise error.__cause__ from None
            raise

    def _messages_of(self, program: Program, order: tuple[Action, ...]) -> OrderMessages:
        known = self._messages.get(id(order))
        if known is None or known.order is not order:
            if len(self._messages) >= 64:
                self._messages.clear()
            known = self._messages[id(order)] = OrderMessages(program, order, self.grid.pipeline)
        return known

    def _agreed(self, program: Program) -> bytes:
        """Return the digest of a program. Before a program's first run, compare its digest across all ranks."""
        known = self._known.get(id(program))
        if known is None:
            if len(self._known) >= 64:
                self._known.clear()
            own = digest_of(program)
            self._compare("program", own)
            self._alarm.look_around()
            if self._links is not None:
                self._links.connect(channels_of(program, self.grid.pipeline))
            known = self._known[id(program)] = program, own
        return known[1]

    def check_open(self, call: str) -> None:
        """Raise ExecutionError after ``close``. ``call`` describes the call in the error message."""
        self._forked.check()
        if self._wire is None:
            why = self._fault or f"it was closed before {call}"
            raise ExecutionError(f"a closed pipeline cannot run; {why}; make a new pipeline")

    def _open_wire(self) -> Channels:
        self.check_open("this step")
        assert self._wire is not None
        return self._wire

    # ---- communication outside the program ------------------------------------------------------------------------

    def agree(self, name: str, own: bytes) -> None:
        """Raise ExecutionError in every rank if ``own`` differs between ranks. The message contains ``name``."""
        with self._one_at_a_time("a comparison"):
            self._compare(name, digest(own))

    def agree_on(self, facts: Facts, remedy: str) -> None:
        """Raise ExecutionError in every rank unless the facts of all ranks are equal. The error lists the differences.

        If the facts are equal, only a small digest is exchanged.
        """
        with self._one_at_a_time("a comparison"):
            own = digest("\n".join(f"{name}: {value}" for name, value in facts.items()).encode())
            if len(set(self._in_all().all_values(own))) > 1:
                said = differences(self._in_all().all_values(dict(facts)))
                with suppress(RuntimeError, ExecutionError):
                    self._in_all().all_values(own)  # so that no rank ends while another one receives the facts
                raise _DifferentError(f"all ranks must have the same model and arguments; {said}; {remedy}")

    def _compare(self, name: str, own: bytes) -> None:
        digests = self._in_all().all_values(own)
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            raise _DifferentError(
                f"all ranks must have the same {name}; rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} of "
                f"{self.num_ranks} {'has' if len(others) == 1 else 'have'} a different {name} than rank 0; pass the "
                f"same arguments on every rank"
            )

    @contextmanager
    def stopping_all(self, call: str) -> Iterator[None]:
        """A context for calling torch.distributed collectives. An error inside the context stops all ranks.

        ``call`` names the call in error messages.
        """
        with self._one_at_a_time(call):
            yield

    def enter(self, method: str) -> None:
        """Record the method of the pipeline that the user calls, for messages about ranks that call others."""
        self._activity.method = method

    def exchange(self, value: Any) -> list[Any]:
        """All-gather in this replica: return each rank's value in pipeline order, with tensors on this device.

        Values are pytrees of tensors and plain values.
        """
        with self._one_at_a_time("an exchange"):
            return self._in_replica().all_values(value)

    def exchange_in_all(self, value: Any) -> list[Any]:
        """All-gather over all ranks of all replicas: return each rank's value in the order of the group."""
        with self._one_at_a_time("an exchange"):
            return self._in_all().all_values(value)

    def exchange_with_peers(self, value: Any) -> list[Any]:
        """All-gather among the ranks at this rank's position in all replicas: return their values in replica order."""
        with self._one_at_a_time("an exchange between replicas"):
            return Exchange(self._open_wire(), self.rank, self.grid.peers, self.device).all_values(value)

    def _in_replica(self) -> Exchange:
        return Exchange(self._open_wire(), self.rank, self.grid.pipeline, self.device)

    def _in_all(self) -> Exchange:
        return Exchange(self._open_wire(), self.rank, range(self.num_ranks), self.device)

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Send values within this replica, and return the values received from ``sources``, keyed by rank.

        All sends come before the first receive, and no send blocks. All trades therefore complete if all ranks call
        ``trade`` in the same order. This method may be called during a run, and by ``RunSpec.prepare``.

        Args:
            what: the kind of the values, as listed in ``rank_exchange``; also used in error messages.
            given: pytrees of tensors, keyed by the receiving rank.
            sources: the ranks that send to this rank.

        """
        with self._stopping_all(f"an exchange of {what}"):
            return self._in_replica().trade(what, given, sources)

    def share(self, source: int, value: Any = None) -> Callable[[], Any]:
        """Broadcast rank ``source``'s value in this replica; return a function that waits for and returns the value.

        This method does not wait for the value, but only one value can be in transit: if the value of the last call has
        not been read, ``share`` and ``close`` first wait for that value. The returned function raises ExecutionError
        if a rank failed before the value arrived.
        """
        with self._one_at_a_time("a broadcast"):
            wire = self._open_wire()
            if self._shared is not None:
                self._shared()
                self._shared = None
            pipeline = self.grid.pipeline
            if self.grid.position == source:
                others = [rank for rank in pipeline if rank != self.rank]
                self._courier.give(value, lambda given: wire.tell_all(others, SHARE, given))
                return lambda: value
            shared = self._shared = Shared(wire.ask(pipeline[source], SHARE))
        return lambda: self._read(shared)

    def share_in_all(self, sources: Sequence[int], value: Any) -> Callable[[], list[Any]]:
        """Broadcast the messages of some ranks to all ranks of all replicas, without waiting.

        Returns a function that waits for all messages and returns them in the order of ``sources``, a list of group
        ranks. If this rank is not in ``sources``, ``value`` is ignored. As with ``share``, the messages of at most one
        call are in transit.
        """
        with self._one_at_a_time("a broadcast"):
            wire = self._open_wire()
            if self._shared is not None:
                self._shared()
            others = [rank for rank in range(self.num_ranks) if rank != self.rank]
            if self.rank in sources:
                self._courier.give(value, lambda given: wire.tell_all(others, SHARE, given))
            takes = {rank: wire.ask(rank, SHARE) for rank in sources if rank != self.rank}
            shared = Shared(lambda: [takes[rank]() if rank in takes else value for rank in sources])
            self._shared = shared
        return lambda: self._read(shared)

    def deal(self, what: str, values: Sequence[Any] = (), *, by_heartbeat: bool = False) -> Any:
        """Scatter rank 0's ``values``, one to each rank; return this rank's value. Rank 0 does not wait.

        ``what`` names the call in error messages. ``by_heartbeat`` states whether the heartbeat's thread makes the call
        while the rank's own thread works.
        """
        with self._one_at_a_time(what, by_heartbeat=by_heartbeat):
            if self.rank:
                return self._in_all().trade(DEALT, {}, (0,))[0]
            self._in_all().trade(DEALT, dict(enumerate(values[1:], 1)), ())
            return values[0]

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raise ``error`` in this rank, and stop all ranks. ``what`` names the call in error messages."""
        with self._one_at_a_time(what):
            raise error

    def _receive_last(self) -> None:
        """Receive the last broadcast when a script exits without having closed the pipeline.

        Another replica may not have sent the broadcast yet, and would fail to send it if this process exited first.
        """
        shared = self._shared
        if shared is not None and not self.closed and not self._alarm.bell.rung:
            with suppress(Exception):
                shared()

    def _read(self, shared: Shared) -> Any:
        if not shared.arrived:
            self._forked.check()
        if self.closed and not shared.arrived:
            raise ExecutionError(
                f"a loss must be received before the pipeline is closed; this loss was not received: "
                f"{self._fault or 'the rank that computed it stopped without sending it'}; read the loss right after "
                f"its step"
            )
        with self._stopping_all("receiving a broadcast"):
            return shared()

    def gather(self, *timelines: RankTimeline) -> list[Span]:
        """Return the spans of all ranks in these runs, in seconds since the first run began, measured on one clock."""
        parts = self.exchange([(one.began_s, spans) for one in timelines if (spans := list(one.spans()))])
        first_s = min((began_s for own in parts for began_s, _ in own), default=0.0)
        return [
            span._replace(start_s=span.start_s + began_s - first_s, end_s=span.end_s + began_s - first_s)
            for own in parts
            for began_s, spans in own
            for span in spans
        ]

    # ---- failure and closing ----------------------------------------------------------------------------------

    @contextmanager
    def _one_at_a_time(self, call: str, *, by_heartbeat: bool = False) -> Iterator[None]:
        if EXIT.begun:
            EXIT.check()
        self._open_wire()
        if not self._busy.acquire(blocking=False):
            raise ExecutionError(
                "a pipeline may run only one call at a time; another call is still running; call again after it has "
                "returned"
            )
        self._activity.begin(call, by_heartbeat=by_heartbeat)
        try:
            with self._stopping_all(call):
                yield
        finally:
            self._activity.end()
            self._busy.release()

    @contextmanager
    def _stopping_all(self, call: str) -> Iterator[None]:
        """A context in which an exception stops all ranks.

        An exception of this rank is raised unchanged; a failure of another rank is raised as an ExecutionError that
        names the failed rank.
        """
        try:
            yield
        except _DifferentError as error:
            raise ExecutionError(*error.args) from None  # raised in every rank, so the pipeline remains usable
        except BaseException as error:
            doing, text = _account(error)
            place = "".join(f", {note}" for note in getattr(error, "__notes__", []))
            text += place or f", in {call}"
            first = self._alarm.ring(text, doing, getattr(error, "ended", None))
            self._fault = str(first)
            _LOG.error("rank %d of %d stopped: %s", self.rank, self.num_ranks, first)
            self._drop()
            if doing == "raised" or (doing == COLLECTIVE and first.who == self._alarm.name):
                raise
            raise ExecutionError(
                f"a failed rank stops all ranks; {first}; rank {self.rank} of {self.num_ranks} stopped{place}; "
                f"fix the cause and make a new pipeline"
            ) from (None if doing == "waits" else error)

    def leave(self, why: str) -> None:
        """Stop all ranks, unless this executor is closed. ``why`` is the reason that the other ranks report."""
        if not self.closed:
            self._fault = str(self._alarm.ring(why, "raised"))
            self._drop()

    def abandon(self, what: str, error: BaseException) -> None:
        """Stop all ranks because of an error in the call ``what``, unless this executor is closed.

        Raises ``error``. If another rank's failure caused ``error``, raises an ExecutionError that names the failed
        rank.
        """
        if not self.closed:
            with self._stopping_all(what):
                raise error

    def _drop(self) -> None:
        if self._forked.here:
            return
        wire = self._wire
        self._wire = None
        self._shared = None
        self._messages.clear()
        self._alarm.end()
        if wire is not None:
            self._end_connections()
            self._courier.end()

    def close(self) -> None:
        """Wait until all sends are complete, then close the executor. Raises ExecutionError if a call is running."""
        if not self._busy.acquire(blocking=False):
            raise ExecutionError("close() was called from inside a running step; call it after the step has returned")
        try:
            with suppress(ConnectionLostError):
                if self._wire is not None and not self._forked.here and not self._alarm.bell.rung:
                    if self._shared is not None:
                        self._shared()
                    self._courier.drain()
                    self._wire.drain()
                    if self._links is not None:
                        self._links.close()
            self._drop()
        finally:
            self._busy.release()


def _account(error: BaseException) -> tuple[Doing, str]:
    """Return the activity in which an error occurred, and a description of the error."""
    if isinstance(error, Stopped | ConnectionLostError):
        return "waits", str(error)
    return doing_at(error), said(error)


def _call(method: WeakMethod[Callable[[], None]]) -> None:
    """Call a method if the method's object still exists."""
    own = method()
    if own is not None:
        own()


class _DifferentError(ExecutionError):
    """The ranks have different values. All ranks raise this error, so the pipeline remains usable."""
