"""Threads: every rank in this process, a thread each; on CUDA devices with streams of its own.

Transport is a queue for each (from, to, kind). A rank that fails stops the others: each looks before every action,
and a rank that waits for a message gets one that says so.

A RunSpec says what to run. A BoundProgram is its program, bound to the stages: it serves each step that runs the same.
A ThreadRun is one run of it, a step or a stream. A RunSegment is a part of every rank's order on its way through the
ranks: the whole order of a step, or what a stream runs for one of its steps.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import finalize, ref

import torch

from pipesched.errors import ExecutionError
from pipesched.program.actions import OTHER_END, Action, Kind
from pipesched.program.program import Program
from pipesched.runtime.coordination.forked_process import Forked, end_in_children
from pipesched.runtime.executors.device_streams import DeviceStreams, Message, streams_for
from pipesched.runtime.executors.interpreter import Rank, StageLike, Stamps, interpret
from pipesched.simulation.trace import Span
from pipesched.tensors.caller_context import Caller

__all__ = ["RunSegment", "RunSpec", "Stopped", "ThreadExecutor", "ThreadRun", "Timeline"]

_STOP = Message("stop")
_REMEMBERED = 64  # programs
_PATIENCE_S = 60  # for the action that a thread is in when its pipeline is dropped, or the process exits
_Jobs = list["SimpleQueue[Callable[[], None] | None]"]  # a queue for each rank's thread


class Stopped(Exception):  # noqa: N818  it is no error: it ends a rank's loop
    """Another rank failed."""


@dataclass(frozen=True)
class RunSpec:
    """What to run: a lowered program, its stages, and the part of its orders, all of it unless given.

    prepare: called with the caller's settings before the ranks start, once nothing else runs; finish: called after
    they have ended, with whether one failed. pair: the program's micro-batch that is run as one of a stream is.
    period: the micro-batches of a step of it.
    """

    program: Program
    stages: Mapping[int, StageLike]
    _: KW_ONLY
    prepare: Callable[[Caller], None] = lambda caller: None
    orders: tuple[tuple[Action, ...], ...] | None = None
    finish: Callable[[bool], None] = lambda failed: None
    pair: Callable[[int], int] = lambda microbatch: microbatch
    period: int = 1


class BoundProgram:
    """The ranks of a program over its stages, and the channels between them. It can serve one run after the other."""

    def __init__(self, run_spec: RunSpec, streams_of_rank: Sequence[DeviceStreams]) -> None:
        self.streams_of_rank = streams_of_rank
        self.program = run_spec.program
        self.stages = run_spec.stages
        self.orders = tuple(run_spec.orders or run_spec.program.orders)
        self.channels = _channels(self.program)
        self.ranks = [
            Rank(index, self.program, self.stages, _Wires(self.program, self.channels, streams), run_spec.pair)
            for index, streams in enumerate(streams_of_rank)
        ]


class ThreadRun:
    """A program under way: its ranks, and what became of them. It runs in one part, or in several."""

    ahead = 1  # parts that are handed on while others run

    def __init__(self, run_spec: RunSpec, bound: BoundProgram, jobs: _Jobs, caller: Caller) -> None:
        self.run_spec = run_spec
        self.bound = bound
        self.caller = caller
        self.error: BaseException | None = None
        self.stopping = threading.Event()
        self.deserted = False  # its ranks are in another process
        #: The part that was handed on last; it holds this run.
        self.last: RunSegment | None = None
        self.start_s = time.perf_counter()
        self._jobs = jobs
        self._lock = threading.Lock()

    def hand(self, orders: Sequence[tuple[Action, ...]]) -> "RunSegment":
        """Give every rank the next part of its order; it begins when it has ended the one before."""
        for streams in self.bound.streams_of_rank:
            if streams.has_streams:
                streams.follow()
        self.last = segment = RunSegment(self, orders)
        handed = 0
        try:
            for index, queue in enumerate(self._jobs):
                job = partial(segment.run_rank, index)
                handed = index + 1  # an interrupt comes between calls: from here on the job is in the queue
                queue.put(job)
        except BaseException:
            self.stop()
            for index in range(handed, len(self._jobs)):
                self._jobs[index].put(partial(segment.run_rank, index))
            raise
        return segment

    def stop(self, error: BaseException | None = None) -> None:
        """Stop all ranks; the first error is kept."""
        with self._lock:
            self.error = self.error or error
        self.stopping.set()
        for channel in self.bound.channels.values():
            channel.put(_STOP)

    def wait(self) -> None:
        """Until every rank has ended what it was given."""
        if self.last is not None:
            self.last.finished.wait()

    def finish(self, segment: "RunSegment") -> "Timeline":
        """Wait until every rank has ended a part: what ran when. Raises what a stage raised, once."""
        segment.finished.wait()
        if self.error is not None:
            error = self.error
            self.error = None
            raise error
        return segment.timeline()

    def abandon(self) -> None:
        """Stop all ranks, and wait until they have stopped."""
        if self.deserted:
            return
        self.stop()
        self.wait()

    @property
    def finished(self) -> bool:
        """Whether every rank has ended what it was given."""
        return self.last is None or self.last.finished.is_set()


class RunSegment:
    """A part of every rank's order, on its way through the ranks."""

    def __init__(self, run: ThreadRun, orders: Sequence[tuple[Action, ...]]) -> None:
        self.finished = threading.Event()
        self._run = run
        self._stamps = [Stamps.room_for(order) for order in orders]
        self._left = len(orders)
        self._lock = threading.Lock()

    def run_rank(self, index: int) -> None:
        """In the rank's thread: run its part to the end, or until another rank fails."""
        run = self._run
        rank = run.bound.ranks[index]
        streams = run.bound.streams_of_rank[index]
        try:
            with run.caller.held(), streams.entered():
                for _ in interpret(rank, streams, self._stamps[index]):
                    if run.stopping.is_set():
                        return
        except Stopped:
            pass
        except BaseException as error:  # raised again in the caller's thread
            ended = isinstance(error.__cause__, StopIteration)  # a generator turns a layer's own into a RuntimeError
            run.stop(error.__cause__ if ended else error)
        finally:
            with self._lock:
                self._left -= 1
                if not self._left:
                    self.finished.set()

    def timeline(self) -> "Timeline":
        """In the caller's thread, which launches behind the part from now on: what ran when, and nothing else of it."""
        streams_of_rank = self._run.bound.streams_of_rank
        for streams, stamps in zip(streams_of_rank, self._stamps, strict=True):
            if streams.has_streams and stamps.ends:
                streams.catch_up(stamps.ends[-1])
        return Timeline(self._stamps, [streams.reader(self._run.start_s) for streams in streams_of_rank])


@dataclass(frozen=True)
class Timeline:
    """The stamps of a run that has ended, by rank, and how to read them."""

    stamps: list[Stamps]
    readers: list[Callable[[Any], float]]

    def spans(self) -> Iterator[Span]:
        """What ran when, in seconds since the step began. On a GPU this waits for the step to end."""
        for rank, (stamps, seconds) in enumerate(zip(self.stamps, self.readers, strict=True)):
            for action, start, end in zip(*stamps, strict=True):
                yield Span(action, rank, seconds(start), seconds(end), action.lane)


_Channels = dict[tuple[int, int, Kind], "SimpleQueue[Message]"]


def _channels(program: Program) -> _Channels:
    channels: _Channels = {}
    sends = program.columns[program.columns.are(Kind.SEND_F, Kind.SEND_B)]
    for stage, kind, _, peer in sends:
        if peer is not None:
            channels.setdefault((program.placement[stage], program.placement[peer], kind), SimpleQueue())
    return channels


class _Wires:
    """One rank's ends of the channels."""

    def __init__(self, program: Program, channels: _Channels, streams: DeviceStreams) -> None:
        self._placement = program.placement
        self._channels = channels
        self._streams = streams

    def sender(self, action: Action) -> Callable[[Any], None]:
        here, there = self._ends(action)
        put = self._channels[here, there, action.kind].put
        pack = self._streams.pack
        return lambda value: put(pack(value))

    def receiver(self, action: Action) -> Callable[[], Any]:
        here, there = self._ends(action)
        get = self._channels[there, here, OTHER_END[action.kind]].get
        unpack = self._streams.unpack

        def receive() -> Any:
            message = get()
            if message is _STOP:
                raise Stopped
            return unpack(message)

        return receive

    def _ends(self, action: Action) -> tuple[int, int]:
        return self._placement[action.stage], self._placement[action.peer or 0]


class ThreadExecutor:
    """Threads that wait for runs. ``close`` ends them; so does dropping the executor."""

    def __init__(self, devices: Sequence[torch.device], intra_op_threads: int) -> None:
        self.streams_of_rank = [streams_for(device) for device in devices]
        self._device_types = {device.type for device in devices}
        self._busy = threading.Lock()
        self._jobs: _Jobs = [SimpleQueue() for _ in devices]
        self._threads = _start_threads(self._jobs, intra_op_threads)
        self._under_way: list[ref[ThreadRun]] = []  # the run that the threads may be in
        self._finalizer = finalize(self, _abandon, self._jobs, self._threads, self._under_way)
        self._last: ThreadRun | None = None
        self._kept: dict[int, BoundProgram] = {}
        self._forked = Forked()
        end_in_children(self)

    def end_in_child(self) -> None:
        """In a child process, which has none of the threads: nothing waits for them."""
        self._forked.here = True
        self._finalizer.detach()
        if self._last is not None:
            self._last.deserted = True

    @property
    def closed(self) -> bool:
        """Whether the threads have been ended."""
        return not self._finalizer.alive

    def run(self, run_spec: RunSpec, *, grad: bool) -> Timeline:
        """Run a lowered program, with grad mode as given, until every rank has ended. An interrupt stops them first.

        Raises what a stage raised, with a note that says where; ExecutionError where a run is under way or after
        ``close``.
        """
        if len(self._kept) >= _REMEMBERED:
            self._kept.clear()
        program = run_spec.program
        bound = self._kept.pop(id(program), None)  # of the run before, where that did not fail
        if bound is None or bound.program is not program or bound.stages is not run_spec.stages or run_spec.orders:
            bound = BoundProgram(run_spec, self.streams_of_rank)
        run = self.begin(run_spec, Caller.here(self._device_types, grad=grad), bound)
        try:
            timeline = run.finish(run.hand(bound.orders))
        except BaseException:
            run.abandon()
            raise
        finally:
            self.end(run)
        if run_spec.orders is None:
            self._kept[id(program)] = bound
        return timeline

    def caller(self, *, grad: bool) -> Caller:
        """The settings of this thread, with grad mode as given."""
        return Caller.here(self._device_types, grad=grad)

    def begin(self, run_spec: RunSpec, caller: Caller, bound: BoundProgram | None = None) -> ThreadRun:
        """Begin a run that is then given its orders in parts. Nothing else runs before ``end``. Raises as ``run``.

        bound: the program of this work, bound to its stages before; default: it is bound now.
        """
        self.check_open("this step")
        if not self._busy.acquire(blocking=False):
            raise ExecutionError(
                "one step at a time; this one was called while another is under way; call it after that one returns"
            )
        try:
            if self._last is not None:
                self._last.wait()  # an impatient interrupt may have left ranks behind
            run_spec.prepare(caller)
            bound = bound or BoundProgram(run_spec, self.streams_of_rank)
            run = self._last = ThreadRun(run_spec, bound, self._jobs, caller)
            self._under_way[:] = [ref(run)]
            for streams in self.streams_of_rank:
                if streams.has_streams:
                    streams.begin()
        except BaseException:
            try:
                run_spec.finish(True)
            finally:
                self._busy.release()
            raise
        return run

    def end(self, run: ThreadRun) -> None:
        """End a run whose ranks have ended what they were given."""
        for streams in self.streams_of_rank:
            if streams.has_streams:
                streams.end()
        if run.finished:
            self._last = None
            run.last = None  # else its batch would live until garbage is collected
        run.run_spec.finish(run.stopping.is_set())
        self._busy.release()

    def check_open(self, what: str) -> None:
        """Raise ExecutionError after ``close``."""
        if not self._finalizer.alive:
            self._forked.check()
            raise ExecutionError(f"a closed pipeline does not run; it was closed before {what}; make a new one")

    def check_outside(self, what: str) -> None:
        """Raise ExecutionError in a rank's own thread, which would wait for itself."""
        self._forked.check()
        if threading.current_thread() in self._threads:
            raise ExecutionError(
                f"a pipeline is used from outside its steps; {what} was called by a layer or a hook that a rank runs; "
                f"call it after the step has returned"
            )

    def close(self) -> None:
        """End the threads and wait for them. Raises ExecutionError when called by one of them."""
        if threading.current_thread() in self._threads:
            raise ExecutionError(
                "a pipeline is closed from outside its steps; close was called by a layer or a hook that a rank runs; "
                "call it after the step has returned"
            )
        if self._finalizer.detach() is not None:
            _end_threads(self._jobs)
        for thread in self._threads:
            thread.join()


def _start_threads(jobs: _Jobs, intra_op_threads: int) -> list[threading.Thread]:
    """Start a thread for each queue, each with its own number of intra-op threads.

    torch keeps that number for each thread, but every call also sets what threads that start later begin with:
    the caller's own number is set again at the end.
    """
    before = torch.get_num_threads()
    started = threading.Barrier(len(jobs) + 1)
    threads = [
        threading.Thread(
            target=_serve, args=(queue, intra_op_threads, started), name=f"pipesched rank {rank}", daemon=True
        )
        for rank, queue in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    started.wait()
    torch.set_num_threads(before)
    return threads


def _serve(jobs: "SimpleQueue[Callable[[], None] | None]", intra_op_threads: int, started: threading.Barrier) -> None:
    """A rank's thread. It holds no reference to the executor, so that dropping that ends this."""
    torch.get_num_threads()  # a thread takes the process's number at its first use, also after it was set
    torch.set_num_threads(intra_op_threads)
    started.wait()
    while (job := jobs.get()) is not None:
        job()
        del job


def _end_threads(jobs: _Jobs) -> None:
    """Let the threads end, once they have run what they were given."""
    for queue in jobs:
        queue.put(None)


def _abandon(jobs: _Jobs, threads: Sequence[threading.Thread], under_way: "Sequence[ref[ThreadRun]]") -> None:
    """Stop what is under way, end the threads and wait for them.

    Python aborts the process if it exits while a thread returns from an operation of torch.
    """
    for run in (one() for one in under_way):
        if run is not None and not run.finished:
            run.stop(ExecutionError("a step runs while its pipeline lives; the process exits; end the step before"))
    _end_threads(jobs)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE_S)
