"""Threads: runs all ranks in this process, with one thread per rank and, on CUDA devices, separate streams per rank.

There is a message queue for each combination of sending rank, receiving rank and kind of send. When a rank fails, the
other ranks stop: each rank checks for a failure before every action, and a rank that waits for a message receives a
stop message.

A RunSpec describes a run. A BoundProgram is the run's program, bound to its stages and channels; later steps of the
same program reuse it. A ThreadRun is one run: a step, or a stream of steps. A RunSegment is one part of every rank's
order of actions: the whole order of a single step, or the part that a stream adds for each step.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from itertools import permutations
from queue import SimpleQueue
from typing import Any
from weakref import finalize, ref

import torch

from pipesched.errors import ExecutionError
from pipesched.program.actions import OTHER_END, SENDS, Action, Kind
from pipesched.program.program import Program
from pipesched.runtime.coordination.forked_process import Forked, end_in_children
from pipesched.runtime.coordination.interpreter_exit import EXIT
from pipesched.runtime.coordination.rank_activity import Stopped
from pipesched.runtime.executors.device_streams import DeviceMessage, DeviceStreams, streams_for
from pipesched.runtime.executors.interpreter import BoundRank, StageLike, Stamps, interpret
from pipesched.simulation.trace import Span
from pipesched.tensors.caller_context import Caller, check_modes
from pipesched.tensors.payload import Payload

__all__ = ["RunSegment", "RunSpec", "ThreadExecutor", "ThreadRun", "Timeline"]

_STOP = DeviceMessage("stop")
_REMEMBERED = 64  # the maximum number of bound programs to keep
_PATIENCE_S = 60  # wait this long for a thread's current action when the pipeline is deleted or the process exits
_Jobs = list["SimpleQueue[Callable[[], None] | None]"]  # a queue for each rank's thread


@dataclass(frozen=True)
class RunSpec:
    """The description of a run: a lowered program, its stages, and functions to call before and after the run."""

    program: Program
    stages: Mapping[int, StageLike]
    _: KW_ONLY
    #: Called with the caller's settings before the ranks start, once any earlier run has ended.
    prepare: Callable[[Caller], None] = lambda caller: None
    #: The part of the program's orders to run. Default: all.
    orders: tuple[tuple[Action, ...], ...] | None = None
    #: Called after the ranks have finished. The argument states whether the run failed.
    finish: Callable[[bool], None] = lambda failed: None
    #: Maps a stream's micro-batch to the program's micro-batch with the same actions. Default: the identity.
    pair: Callable[[int], int] = lambda microbatch: microbatch
    #: The number of micro-batches in a step of a stream.
    period: int = 1


class BoundProgram:
    """A program's ranks, bound to their stages, and the channels between the ranks. Later runs may reuse the object."""

    def __init__(self, run_spec: RunSpec, streams_of_rank: Sequence[DeviceStreams]) -> None:
        self.streams_of_rank = streams_of_rank
        self.program = run_spec.program
        self.stages = run_spec.stages
        self.orders = tuple(run_spec.orders or run_spec.program.orders)
        self.channels = _channels(self.program)
        self.ranks = [
            BoundRank(
                index, self.program, self.stages, _QueueTransport(self.program, self.channels, streams), run_spec.pair
            )
            for index, streams in enumerate(streams_of_rank)
        ]


class ThreadRun:
    """A run in progress. Each call to ``hand`` adds the next part of every rank's order of actions."""

    ahead = 1  # number of parts that may be queued while an earlier part runs

    def __init__(self, run_spec: RunSpec, bound: BoundProgram, jobs: _Jobs, caller: Caller) -> None:
        self.run_spec = run_spec
        self.bound = bound
        self.caller = caller
        self.error: BaseException | None = None
        self.stopping = threading.Event()
        self.deserted = False  # True in a forked child: the threads exist only in the parent
        #: The part that was queued last. The part references this run, so ``end`` resets this attribute.
        self.last: RunSegment | None = None
        self.start_s = time.perf_counter()
        self._jobs = jobs
        self._lock = threading.Lock()

    def hand(self, orders: Sequence[tuple[Action, ...]]) -> "RunSegment":
        """Queue the next part of every rank's order. A rank starts the part once its previous part has ended."""
        if EXIT.begun:
            EXIT.check()
        for streams in self.bound.streams_of_rank:
            if streams.has_streams:
                streams.follow()
        self.last = segment = RunSegment(self, orders)
        handed = 0
        try:
            for index, queue in enumerate(self._jobs):
                job = partial(segment.run_rank, index)
                handed = index + 1  # set before put(): an interrupt between calls must not queue the job twice
                queue.put(job)
        except BaseException:
            self.stop()
            for index in range(handed, len(self._jobs)):
                self._jobs[index].put(partial(segment.run_rank, index))
            raise
        return segment

    def stop(self, error: BaseException | None = None) -> None:
        """Stop all ranks. ``error`` becomes the run's error, unless the run already has one."""
        with self._lock:
            self.error = self.error or error
        self.stopping.set()
        for channel in self.bound.channels.values():
            channel.put(_STOP)

    def wait(self) -> None:
        """Wait until every rank has finished the parts queued so far."""
        if self.last is not None:
            self.last.finished.wait()

    def finish(self, segment: "RunSegment") -> "Timeline":
        """Wait until every rank has finished a part; return the part's timeline.

        Raises the first exception of a stage; a later call does not raise it again.
        """
        segment.finished.wait()
        if self.error is not None:
            error = self.error
            self.error = None
            raise error
        return segment.timeline()

    def abandon(self) -> None:
        """Stop all ranks and wait until they have stopped."""
        if self.deserted:
            return
        self.stop()
        self.wait()

    @property
    def finished(self) -> bool:
        """Whether every rank has finished the parts queued so far."""
        return self.last is None or self.last.finished.is_set()


class RunSegment:
    """One part of every rank's order of actions. Each rank runs its part in its own thread."""

    def __init__(self, run: ThreadRun, orders: Sequence[tuple[Action, ...]]) -> None:
        self.finished = threading.Event()
        self._run = run
        self._stamps = [Stamps.room_for(order) for order in orders]
        self._left = len(orders)
        self._lock = threading.Lock()

    def run_rank(self, index: int) -> None:
        """Run the rank's part to the end, or until another rank fails. Called in the rank's thread."""
        run = self._run
        rank = run.bound.ranks[index]
        streams = run.bound.streams_of_rank[index]

        def interpreted() -> None:
            with run.caller.held(streams.device), streams.entered():
                for _ in interpret(rank, streams, self._stamps[index]):
                    if run.stopping.is_set():
                        return
                rank.finish(self._stamps[index])

        try:
            run.caller.context.copy().run(interpreted)  # a context can be entered by one thread at a time
        except Stopped:
            pass
        except BaseException as error:  # raised again in the caller's thread
            ended = isinstance(error.__cause__, StopIteration)  # a layer's StopIteration, wrapped by the generator
            run.stop(error.__cause__ if ended else error)
        finally:
            with self._lock:
                self._left -= 1
                if not self._left:
                    self.finished.set()

    def timeline(self) -> "Timeline":
        """Make the caller's streams wait for the part, and return its timeline. Called in the caller's thread."""
        streams_of_rank = self._run.bound.streams_of_rank
        for streams, stamps in zip(streams_of_rank, self._stamps, strict=True):
            if streams.has_streams and stamps.ends:
                streams.catch_up(stamps.ends[-1])
        return Timeline(self._stamps, [streams.reader(self._run.start_s) for streams in streams_of_rank])


@dataclass(frozen=True)
class Timeline:
    """The time stamps of a finished run, and one function per rank that converts its stamps to seconds."""

    stamps: list[Stamps]
    readers: list[Callable[[Any], float]]

    def spans(self) -> Iterator[Span]:
        """Yield the span of each action, in seconds since the run began. On a GPU, this waits for the run to end."""
        for rank, (stamps, seconds) in enumerate(zip(self.stamps, self.readers, strict=True)):
            for action, start, end in zip(*stamps, strict=True):
                yield Span(action, rank, seconds(start), seconds(end), action.lane)


_Channels = dict[tuple[int, int, Kind], "SimpleQueue[DeviceMessage]"]


def _channels(program: Program) -> _Channels:
    channels: _Channels = {}
    sends = program.columns[program.columns.are(*SENDS)]
    for stage, kind, _, peer in sends:
        if peer is not None:
            channels.setdefault((program.placement[stage], program.placement[peer], kind), SimpleQueue())
    if program.has_norms:
        channels |= {(*ends, Kind.NORM): SimpleQueue() for ends in permutations(set(program.placement), 2)}
    return channels


class _QueueTransport:
    """The interpreter's transport: sends and receives over the queues between one rank and the other ranks."""

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

    def exchange(self, rank: int) -> tuple[Callable[[list[Any]], None], Callable[[], list[Any]]]:
        others = sorted({*self._placement} - {rank})
        puts = [self._channels[rank, other, Kind.NORM].put for other in others]
        gets = [self._channels[other, rank, Kind.NORM].get for other in others]

        def send(values: list[Any]) -> None:
            message = self._streams.pack(Payload.of(values))
            for put in puts:
                put(message)

        def receive() -> list[Any]:
            messages = [get() for get in gets]
            if any(message is _STOP for message in messages):
                raise Stopped
            return [value for message in messages for value in self._streams.unpack(message).value]

        return send, receive

    def _ends(self, action: Action) -> tuple[int, int]:
        return self._placement[action.stage], self._placement[action.peer or 0]


class ThreadExecutor:
    """Runs programs with one thread per rank.

    The threads start with ``start`` or the first run, and end on ``close`` or when the executor is deleted.
    """

    def __init__(self, devices: Sequence[torch.device], intra_op_threads: int) -> None:
        self._devices = devices
        self._intra_op_threads = intra_op_threads
        self._device_types = {device.type for device in devices}
        self._busy = threading.Lock()
        self._jobs: _Jobs = [SimpleQueue() for _ in devices]
        self._threads: list[threading.Thread] = []
        self._under_way: list[ref[ThreadRun]] = []  # the run that the threads may be executing
        self._finalizer = finalize(self, _abandon, self._jobs, self._threads, self._under_way)
        self._last: ThreadRun | None = None
        self._kept: dict[int, BoundProgram] = {}
        self._forked = Forked()
        end_in_children(self)

    @cached_property
    def streams_of_rank(self) -> list[DeviceStreams]:
        """The streams of each rank. Only an executor that runs uses its devices."""
        return [streams_for(device) for device in self._devices]

    def start(self) -> None:
        """Start the threads, unless they have been started."""
        if not self._threads:
            self._threads += _start_threads(self._jobs, self._intra_op_threads)

    def with_devices(self, devices: Sequence[torch.device]) -> "ThreadExecutor":
        """Return a new executor with one thread per device."""
        return ThreadExecutor(devices, self._intra_op_threads)

    def end_in_child(self) -> None:
        """Disable the executor in a forked child process, because its threads exist only in the parent process."""
        self._forked.here = True
        self._finalizer.detach()
        if self._last is not None:
            self._last.deserted = True

    @property
    def closed(self) -> bool:
        """Whether the threads have been stopped."""
        return not self._finalizer.alive

    def run(
        self,
        run_spec: RunSpec,
        *,
        grad: bool,
        caller: Caller | None = None,
        looks: Sequence[Hashable] = (),
        values: bytes = b"",
    ) -> Timeline:
        """Run a lowered program until all ranks have finished. An interrupt is raised only once all ranks have stopped.

        ``looks`` and ``values`` are not used, because nothing is sent to another process.

        Raises:
            ExecutionError: if a run is in progress, or after ``close``. An exception of a stage is raised unchanged,
                with a note that names the action.

        """
        if len(self._kept) >= _REMEMBERED:
            self._kept.clear()
        program = run_spec.program
        bound = self._kept.pop(id(program), None)  # bound by an earlier run that succeeded
        if bound is None or bound.program is not program or bound.stages is not run_spec.stages or run_spec.orders:
            bound = BoundProgram(run_spec, self.streams_of_rank)
        here = self.caller(grad=grad)  # also with a caller, because it refuses modes of this thread
        run = self.begin(run_spec, here if caller is None else caller, bound)
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
        """Return the settings of this thread, with ``grad`` as the grad mode.

        Raises InputError if a mode or a hook of this thread cannot act in the ranks' threads.
        """
        check_modes()
        return Caller.here(self._device_types, grad=grad)

    @property
    def busy(self) -> bool:
        """Whether a run is in progress."""
        return self._busy.locked()

    def begin(
        self, run_spec: RunSpec, caller: Caller, bound: BoundProgram | None = None, *, values: bytes = b""
    ) -> ThreadRun:
        """Begin a run that receives the ranks' orders in several parts. No other run may begin before ``end``.

        Raises the same errors as ``run``. ``bound`` is the program, already bound to its stages. Default: ``begin``
        binds the program. ``values`` is not used, because all ranks get one batch.
        """
        if EXIT.begun:
            EXIT.check()
        self.check_open("this step")
        if not self._busy.acquire(blocking=False):
            raise ExecutionError(
                "a pipeline may run only one call at a time; another call is still running; call again after it has "
                "returned"
            )
        try:
            if not self._threads:
                self.start()
            if self._last is not None:
                self._last.wait()  # an interrupt during abandon() may have left ranks running
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
        """End a run whose ranks have finished."""
        failed = run.stopping.is_set()
        for streams in self.streams_of_rank:
            if failed and streams.has_streams:  # otherwise the timelines of the parts did this
                streams.end()
        if run.finished:
            self._last = None
            run.last = None  # break the reference cycle, which would keep the batch alive
        run.run_spec.finish(failed)
        self._busy.release()

    def check_open(self, call: str) -> None:
        """Raise ExecutionError after ``close``. ``call`` describes the call in the error message."""
        if not self._finalizer.alive:
            self._forked.check()
            raise ExecutionError(f"a closed pipeline cannot run; it was closed before {call}; make a new pipeline")

    def check_outside(self, method: str) -> None:
        """Raise ExecutionError if called in a rank's thread, because the thread would wait for itself.

        ``method`` is the method's name in the message.
        """
        self._forked.check()
        if threading.current_thread() in self._threads:
            raise ExecutionError(
                f"{method}() was called from inside a running step (by a layer or a hook); "
                f"call it after the step has returned"
            )

    def abandon(self, what: str, error: BaseException) -> None:
        """Close the executor: there is no other process that must know of the error."""
        self.close()

    def close(self) -> None:
        """End the threads and wait for them. Raises ExecutionError if called from one of these threads."""
        if threading.current_thread() in self._threads:
            raise ExecutionError(
                "close() was called from inside a running step (by a layer or a hook); "
                "call it after the step has returned"
            )
        if self._finalizer.detach() is not None:
            _end_threads(self._jobs)
        for thread in self._threads:
            thread.join()


def _start_threads(jobs: _Jobs, intra_op_threads: int) -> list[threading.Thread]:
    """Start a thread for each queue, and set each thread's number of intra-op threads.

    torch keeps the number per thread, but setting the number also changes the default for threads that start later.
    Therefore the caller's number is set again at the end.
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
    """The main loop of a rank's thread. Holds no reference to the executor."""
    torch.get_num_threads()  # the first call sets the process's default, so it must come before set_num_threads()
    torch.set_num_threads(intra_op_threads)
    started.wait()
    while (job := jobs.get()) is not None:
        job()
        del job


def _end_threads(jobs: _Jobs) -> None:
    """Tell the threads to end once they have run their queued jobs."""
    for queue in jobs:
        queue.put(None)


def _abandon(jobs: _Jobs, threads: Sequence[threading.Thread], under_way: "Sequence[ref[ThreadRun]]") -> None:
    """Stop the run in progress, end the threads and wait for them.

    Without the wait, a thread could return from a torch operation while Python exits, which would abort the process.
    """
    for run in (one() for one in under_way):
        if run is not None and not run.finished:
            run.stop(
                ExecutionError(
                    "a pipeline must not be deleted while a step runs; a step was still running; keep the pipeline "
                    "until the step has ended"
                )
            )
    _end_threads(jobs)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE_S)
