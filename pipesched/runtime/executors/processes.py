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

import time
from collections.abc import Hashable, Sequence

import torch

from pipesched.program.actions import Action
from pipesched.program.program import Program
from pipesched.runtime.connected_rank import ConnectedRank, account
from pipesched.runtime.coordination.rank_activity import Stopped
from pipesched.runtime.executors.channel_plan import ChannelEnds, OrderMessages, channels_of, digest_of
from pipesched.runtime.executors.device_streams import streams_for
from pipesched.runtime.executors.interpreter import BoundRank, Stamps, interpret
from pipesched.runtime.executors.rank_run import RankRun, RankTimeline
from pipesched.runtime.executors.threads import RunSpec
from pipesched.runtime.transport.layout_predictor import digest
from pipesched.tensors.caller_context import Caller, intra_op

__all__ = ["ProcessExecutor"]


class ProcessExecutor:
    """Runs programs on one rank of a pipeline in a separate process. All methods that run steps are collective.

    Args:
        connected: this process's rank, connected to the other ranks. After a failure, it is closed in all ranks.
        intra_op_threads: the number of CPU threads per operation on this rank.

    """

    def __init__(self, connected: ConnectedRank, intra_op_threads: int = 1) -> None:
        self.connected = connected
        self._grid = connected.grid
        self._activity = connected.activity
        self._streams = streams_for(connected.device)
        self._threads = intra_op_threads
        self._known: dict[int, tuple[Program, bytes]] = {}
        self._steps = 0

    @property
    def closed(self) -> bool:
        return self.connected.closed

    @property
    def busy(self) -> bool:
        """Whether a run or another call is in progress."""
        return self.connected.busy

    def start(self) -> None:
        """Do nothing: the rank is this thread of this process."""

    def with_devices(self, devices: Sequence[torch.device]) -> "ProcessExecutor":
        """Return this executor: a rank without stages still takes part in collective calls."""
        self.connected.bound.clear()
        self._known.clear()
        return self

    def check_open(self, call: str) -> None:
        self.connected.check_open(call)

    def check_outside(self, method: str) -> None:
        self.connected.check_outside(method)

    def abandon(self, what: str, error: BaseException) -> None:
        self.connected.abandon(what, error)

    def close(self) -> None:
        self.connected.close()

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

        Raises:
            ExecutionError: if another rank failed (the message names that rank), if ranks run different programs or
                steps, and after ``close``. An exception of a stage of this rank is raised unchanged, with a note that
                names the action.

        """
        with self.connected.alone("a step"):
            failed = True
            try:
                timeline = self._run(run_spec, caller or self.caller(grad=grad), looks, values)
                failed = False
            except BaseException as error:
                self._activity.fail(*account(error))
                raise
            finally:
                run_spec.finish(failed)
            return timeline

    def _run(self, run_spec: RunSpec, caller: Caller, looks: Sequence[Hashable], values: bytes) -> RankTimeline:
        program = run_spec.program
        wire = self.connected.wire()
        orders = program.orders if run_spec.orders is None else run_spec.orders
        messages = self._messages_of(program, self._own_order(orders))
        keys, batch, shapes = messages.keys(looks, caller.grad)
        step = digest(b"%d %s" % (self._steps, self._activity.method.encode()))
        identity = self._agreed(program) + batch + step + digest(values)
        self.connected.compare_planes(identity, shapes)
        wire.open(keys, identity, shapes)
        self._steps += 1
        run_spec.prepare(caller)
        start_s = time.perf_counter()
        self._streams.begin()
        return self._run_order(self._rank_of(run_spec, messages), orders, caller, start_s, program)

    def _own_order(self, orders: Sequence[tuple[Action, ...]]) -> tuple[Action, ...]:
        """Return the order of this rank; empty if the rank holds no stages."""
        position = self._grid.position
        return orders[position] if position < len(orders) else ()

    def caller(self, *, grad: bool) -> Caller:
        """Return the inference mode and the autocast settings of this thread, with ``grad`` as the grad mode."""
        return Caller.here({self.connected.device.type}, grad=grad)

    def begin(self, run_spec: RunSpec, caller: Caller, *, values: bytes = b"") -> RankRun:
        with self.connected.alone("the start of asynchronous steps"):
            program = run_spec.program
            wire = self.connected.wire()
            channels = OrderMessages(program, self._own_order(program.orders), self._grid.pipeline).none
            try:
                step = digest(b"%d" % self._steps)
                identity = self._agreed(program) + digest(b"stream") + step + digest(values)
                self.connected.compare_planes(identity, "")
                wire.open(channels, identity)
                self._steps += 1
                run_spec.prepare(caller)
            except BaseException as error:
                self._activity.fail(*account(error))
                run_spec.finish(True)
                raise
            ends_of_rank = ChannelEnds(program, wire, self._grid.pipeline)
            rank = BoundRank(self._grid.position, program, run_spec.stages, ends_of_rank, run_spec.pair)
            run = RankRun(run_spec, caller, rank, self.continue_run, self.connected.leave)
            self._streams.begin()
            return run

    def continue_run(self, run: RankRun, orders: Sequence[tuple[Action, ...]]) -> RankTimeline:
        """Run the next part of a stream, and return its timeline."""
        with self.connected.alone("a step"):
            run.failed = True
            messages = OrderMessages(run.run_spec.program, self._own_order(orders), self._grid.pipeline)
            self.connected.wire().extend(messages.repeated(run.run_spec.period))
            timeline = self._run_order(run.rank, orders, run.caller, run.began_s, run.run_spec.program)
            run.failed = False
            return timeline

    def end(self, run: RankRun) -> None:
        run.run_spec.finish(run.failed)

    def _run_order(
        self,
        rank: BoundRank,
        orders: Sequence[tuple[Action, ...]],
        caller: Caller,
        start_s: float,
        program: Program,
    ) -> RankTimeline:
        self._streams.follow()
        if self.connected.links is not None:
            self.connected.links.begin()
        stamps = Stamps.room_for(self._own_order(orders))
        grid = self._grid
        self._activity.run(stamps, [grid.pipeline[rank] for rank in program.placement])
        try:
            with intra_op(self._threads), caller.held(), self._streams.entered():
                self._interpret(rank, stamps)
                rank.finish(stamps)
        finally:
            self._streams.end()
        size = len(grid.pipeline)
        all_stamps = [stamps if index == grid.position else Stamps.room_for(()) for index in range(size)]
        began_s = start_s + self.connected.time_offset_s
        return RankTimeline(all_stamps, [self._streams.reader(start_s)] * size, began_s, orders)

    def _rank_of(self, run_spec: RunSpec, messages: OrderMessages) -> BoundRank:
        """Return the Rank for a run's stages.

        Later runs with the same stages reuse the Rank. If this run executes only a part of each rank's order, the Rank
        is not kept, because the next run then has different stages.
        """
        rank = messages.rank
        if rank is None or rank.stages is not run_spec.stages:
            ends = ChannelEnds(run_spec.program, self.connected.wire(), self._grid.pipeline)
            rank = BoundRank(self._grid.position, run_spec.program, run_spec.stages, ends, run_spec.pair)
            messages.rank = rank if run_spec.orders is None else None
        return rank

    def _interpret(self, rank: BoundRank, stamps: Stamps) -> None:
        bell = self.connected.alarm.bell
        try:
            for _ in interpret(rank, self._streams, stamps):
                if bell.rung:
                    raise Stopped
        except RuntimeError as error:
            if isinstance(error.__cause__, StopIteration):  # the generator has wrapped a layer's StopIteration
                raise error.__cause__ from None
            raise

    def _messages_of(self, program: Program, order: tuple[Action, ...]) -> OrderMessages:
        bound: dict[int, OrderMessages] = self.connected.bound
        known = bound.get(id(order))
        if known is None or known.order is not order:
            if len(bound) >= 64:
                bound.clear()
            known = bound[id(order)] = OrderMessages(program, order, self._grid.pipeline)
        return known

    def _agreed(self, program: Program) -> bytes:
        """Return the digest of a program. Before a program's first run, compare its digest across all ranks."""
        known = self._known.get(id(program))
        if known is None:
            if len(self._known) >= 64:
                self._known.clear()
            own = digest_of(program)
            self.connected.compare("program", own)
            self.connected.alarm.look_around()
            if self.connected.links is not None:
                self.connected.links.connect(channels_of(program, self._grid.pipeline))
            known = self._known[id(program)] = program, own
        return known[1]
