"""Local executor: every rank in this process, a thread each; on CUDA devices with streams of its own.

Transport is a queue for each (from, to, kind). A rank that fails stops the others: each looks before every action,
and a rank that waits for a message gets one that says so.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any
from weakref import finalize

import torch

from pipesched.actions import OTHER_END, Action, Kind
from pipesched.caller import Caller
from pipesched.errors import ExecutionError
from pipesched.executors.interpreter import Rank, StageLike, interpret
from pipesched.executors.streams import Lane, Message, lane_for
from pipesched.program import Program
from pipesched.trace import Span

__all__ = ["LocalExecutor", "Timeline", "Work"]

_STOP = Message("stop")


class _Stopped(Exception):  # noqa: N818  it is no error: it ends a rank's loop
    """Another rank failed."""


@dataclass(frozen=True)
class Work:
    """What to run: a lowered program, its stages, and the part of its orders, all of it unless given.

    prepare: called with the caller's settings before the ranks start, once nothing else runs; finish: called after
    they have ended, also when one failed.
    """

    program: Program
    stages: Mapping[int, StageLike]
    prepare: Callable[[Caller], None]
    orders: tuple[tuple[Action, ...], ...] | None = None
    finish: Callable[[], None] = lambda: None


class Run:
    """One program run once: the ranks, their channels, and what became of them."""

    def __init__(self, work: Work, lanes: Sequence[Lane], caller: Caller) -> None:
        program, orders = work.program, work.orders or work.program.orders
        self.caller = caller
        self.lanes = lanes
        self.error: BaseException | None = None
        self._stopping = threading.Event()
        self._left = len(lanes)
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._channels = _channels(program)
        self.ranks = [
            Rank(index, program, work.stages, _Wires(program, self._channels, lane), lane, orders[index])
            for index, lane in enumerate(lanes)
        ]

    def run_rank(self, index: int) -> None:
        """In the rank's thread: run its order to the end, or until another rank fails."""
        try:
            with self.caller.held(), self.lanes[index].entered():
                for _ in interpret(self.ranks[index]):
                    if self._stopping.is_set():
                        return
        except _Stopped:
            pass
        except BaseException as error:  # raised again in the caller's thread
            ended = isinstance(error.__cause__, StopIteration)  # a generator turns a layer's own into a RuntimeError
            self.stop(error.__cause__ if ended else error)
        finally:
            with self._lock:
                self._left -= 1
                if not self._left:
                    self._finished.set()

    def stop(self, error: BaseException | None = None) -> None:
        """Stop all ranks; the first error is kept."""
        with self._lock:
            self.error = self.error or error
        self._stopping.set()
        for channel in self._channels.values():
            channel.put(_STOP)

    def start(self, jobs: "Sequence[SimpleQueue[Callable[[], None] | None]]") -> None:
        """Hand every rank to its thread and wait until all have ended. An interrupt of the caller stops them first."""
        handed = 0
        try:
            for index, queue in enumerate(jobs):
                handed = index + 1
                queue.put(_job(self, index))
            self._finished.wait()
        except BaseException:
            self.stop()
            for index in range(handed, len(jobs)):
                jobs[index].put(_job(self, index))
            self._finished.wait()
            raise

    def wait(self) -> None:
        """Until every rank has ended."""
        self._finished.wait()

    def timeline(self) -> "Timeline":
        """What ran when; holds nothing else of the run."""
        readers = [lane.reader() for lane in self.lanes]
        return Timeline([rank.stamps for rank in self.ranks], readers)


@dataclass(frozen=True)
class Timeline:
    """The stamps of a run that has ended, by rank, and how to read them."""

    stamps: list[list[tuple[Action, Any, Any]]]
    readers: list[Callable[[Any], float]]

    def spans(self) -> Iterator[Span]:
        """What ran when, in seconds since the step began. On a GPU this waits for the step to end."""
        for rank, (stamps, seconds) in enumerate(zip(self.stamps, self.readers, strict=True)):
            for action, start, end in stamps:
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

    def __init__(self, program: Program, channels: _Channels, lane: Lane) -> None:
        self._placement = program.placement
        self._channels = channels
        self._lane = lane

    def send(self, action: Action, value: Any) -> None:
        here, there = self._ends(action)
        self._channels[here, there, action.kind].put(self._lane.pack(value))

    def receive(self, action: Action) -> Any:
        here, there = self._ends(action)
        message = self._channels[there, here, OTHER_END[action.kind]].get()
        if message is _STOP:
            raise _Stopped
        return self._lane.unpack(message)

    def _ends(self, action: Action) -> tuple[int, int]:
        return self._placement[action.stage], self._placement[action.peer or 0]


class LocalExecutor:
    """Threads that wait for runs. ``close`` ends them; so does dropping the executor."""

    def __init__(self, devices: Sequence[torch.device], intra_op_threads: int) -> None:
        self.lanes = [lane_for(device) for device in devices]
        self._device_types = {device.type for device in devices}
        self._busy = threading.Lock()
        self._jobs: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in devices]
        self._threads = _start_threads(self._jobs, intra_op_threads)
        self._finalizer = finalize(self, _end_threads, self._jobs)
        self._last: Run | None = None

    @property
    def closed(self) -> bool:
        """Whether the threads have been ended."""
        return not self._finalizer.alive

    def run(self, work: Work, *, grad: bool) -> Timeline:
        """Run a lowered program, with grad mode as given, until every rank has ended.

        Raises what a stage raised, with a note that says where; ExecutionError where a run is under way or after
        ``close``.
        """
        if self.closed:
            raise ExecutionError("a closed pipeline does not run; it was closed before this step; make a new one")
        if not self._busy.acquire(blocking=False):
            raise ExecutionError(
                "one step at a time; this one was called while another is under way; call it after that one returns"
            )
        try:
            return self._run(work, Caller.here(self._device_types, grad=grad))
        finally:
            work.finish()
            self._busy.release()

    def _run(self, work: Work, caller: Caller) -> Timeline:
        if self._last is not None:
            self._last.wait()  # an impatient interrupt may have left ranks behind
        work.prepare(caller)
        run = self._last = Run(work, self.lanes, caller)
        start_s = time.perf_counter()
        for lane in self.lanes:
            lane.begin(start_s)
        run.start(self._jobs)
        for lane in self.lanes:
            lane.end()
        self._last = None
        if run.error is not None:
            error, run.error = run.error, None
            raise error
        return run.timeline()

    def close(self) -> None:
        """End the threads and wait for them. Raises ExecutionError when called by one of them."""
        if threading.current_thread() in self._threads:
            raise ExecutionError(
                "a pipeline is closed from outside its steps; close was called by a layer or a hook that a rank runs; "
                "call it after the step has returned"
            )
        self._finalizer()
        for thread in self._threads:
            thread.join()


def _job(run: Run, index: int) -> Callable[[], None]:
    return lambda: run.run_rank(index)


def _start_threads(
    jobs: "list[SimpleQueue[Callable[[], None] | None]]", intra_op_threads: int
) -> list[threading.Thread]:
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


def _end_threads(jobs: "list[SimpleQueue[Callable[[], None] | None]]") -> None:
    for queue in jobs:
        queue.put(None)
