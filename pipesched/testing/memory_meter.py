"""Memory meter: measures the exact memory of each rank of a running pipeline, for comparison with the prediction."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipesched.checks import check_type
from pipesched.errors import ExecutionError
from pipesched.pipeline.pipeline import Pipeline
from pipesched.runtime.executors.device_streams import DeviceMessage, DeviceStreams
from pipesched.runtime.stage.stage import Stage
from pipesched.runtime.step_parts import LateUpdates, ReplicaGradients
from pipesched.tensors.memory_tracker import Books, Ledger, books_of
from pipesched.tensors.payload import Payload

__all__ = ["MemoryMeter"]


class MemoryMeter:
    """Measures the memory that each rank of a pipeline uses, for the ranks in this process.

    ::

        with MemoryMeter(pipe) as meter:  # before the first step
            pipe.step(x, target=y)
            print(meter.peak_bytes, pipe.predicted_memory)

    On a CPU the meter counts the live storages that a rank's operations created, and the stages' parameters, buffers,
    gradients and optimizer state. It counts neither the batch nor memory used inside kernels. Messages between ranks on
    one device are copied, as between different devices, so that each rank has its own copy. On a GPU the meter reads
    the allocator, which counts all ranks on that device together.

    Args:
        pipe: the Pipeline. Counting starts when the meter is constructed, and stops when the ``with`` block ends.

    """

    def __init__(self, pipe: Pipeline) -> None:
        check_type(pipe, Pipeline, "pipe must be a Pipeline", "pass the pipeline to measure")
        self._pipe = pipe
        self._host = pipe._running.host
        self._books = dict[int, Books]()
        self._put_back = list[Callable[[], None]]()
        self.mark()

    def __enter__(self) -> "MemoryMeter":
        return self

    def __exit__(self, *error: object) -> None:
        """Stop counting. ``peak_bytes`` can still be read."""
        while self._put_back:
            self._put_back.pop()()

    def mark(self) -> None:
        """Reset the peak to the memory in use now. Also call this method after ``replan``."""
        if self._host is not self._pipe._running.host or not self._books:
            self.__exit__()
            self._attach()
        program = self._pipe._running.assembly.program
        for index, stage in self._pipe._running.assembly.stages.items():
            books = self._books[program.placement[index]]
            if isinstance(books, Ledger):
                books.add(_own(stage))
        for books in self._books.values():
            books.mark()

    def _attach(self) -> None:
        """Start counting for the pipeline's current ranks."""
        self._books.clear()
        self._host = host = self._pipe._running.host
        executor: Any = host.executor
        if host.grid.in_one_process:
            streams_of_rank = list(executor.streams_of_rank)
            for rank, streams in enumerate(streams_of_rank):
                self._books[rank] = books_of(host.grid.devices[rank])
                executor.streams_of_rank[rank] = _Metered(streams, self._books[rank], copies=True)

            def put_back() -> None:
                executor.streams_of_rank[:] = streams_of_rank
                executor._kept.clear()

            executor._kept.clear()
            self._put_back.append(put_back)
        else:
            streams = executor._streams
            books = self._books[host.grid.position] = books_of(host.grid.devices[host.grid.position])
            executor._streams = _Metered(streams, books, copies=False)
            self._put_back.append(lambda: setattr(executor, "_streams", streams))
            self._replace(executor, "run", partial(_watched, books))
            parts = self._pipe._steps._parts.step
            after_run = list(parts.after_run)
            late: tuple[Any, ...] = (ReplicaGradients, LateUpdates)
            parts.after_run[:] = [
                _watched(books, method) if isinstance(getattr(method, "__self__", None), late) else method
                for method in after_run
            ]
            self._put_back.append(lambda: parts.after_run.__setitem__(slice(None), after_run))
            if host.sums is not None:
                self._replace(host.sums._lane, "start", partial(_with_watched_jobs, books))
            if isinstance(books, Ledger):
                self._replace(torch.UntypedStorage, "resize_", partial(_with_noted_sizes, books))

    def _replace(self, holder: Any, name: str, change: Callable[[Any], Any]) -> None:
        """Replace a method of an object or a class, until counting stops.

        ``holder`` must inherit the method, so that deleting the replacement restores it.
        """
        setattr(holder, name, change(getattr(holder, name)))
        self._put_back.append(lambda: delattr(holder, name))

    @property
    def peak_bytes(self) -> dict[int, int]:
        """The peak of each rank's memory since the last ``mark``, in bytes.

        Raises:
            ExecutionError: ``replan`` has replaced the ranks; call ``mark`` after ``replan``.

        """
        if self._host is not self._pipe._running.host:
            raise ExecutionError(
                f"a MemoryMeter can measure only the ranks that existed at its last mark(); replan() has replaced "
                f"these {len(self._books)} ranks; call mark() after replan()"
            )
        return {rank: books.peak for rank, books in self._books.items()}


def _own(stage: Stage) -> Iterable[Tensor]:
    for module in stage.modules.values():
        yield from module.buffers()
        for parameter in module.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    if stage.optimizer.wrapped is not None:
        for state in stage.optimizer.wrapped.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


class _Metered:
    """Wraps the DeviceStreams of a rank, to count the allocations that the rank makes."""

    def __init__(self, streams: DeviceStreams, books: Books, *, copies: bool) -> None:
        self._streams = streams
        self._books = books
        self._copies = copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streams, name)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self._streams.entered(), self._books.watching():
            yield

    def unpack(self, message: DeviceMessage) -> Any:
        value = self._streams.unpack(message)
        return _copied(value) if self._copies and isinstance(self._books, Ledger) else value


def _watched(books: Books, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``method`` that also counts the allocations that the method makes in its thread."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with books.watching():
            return method(*args, **kwargs)

    return run


def _with_watched_jobs(books: Books, start: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a replacement for a collective lane's ``start`` that also counts the allocations of each job."""
    return lambda job: start(_watched(books, job))


def _with_noted_sizes(books: Ledger, resize: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``UntypedStorage.resize_`` that also records the new size in ``books``."""

    def run(storage: Any, *args: Any) -> Any:
        result = resize(storage, *args)
        books.resized(storage)
        return result

    return run


def _copied(value: Any) -> Any:
    change: Callable[[Tensor], Tensor] = Tensor.clone
    if isinstance(value, Payload):
        return value.map_tensors(change)
    return tuple(entry if entry is None else change(entry) for entry in value)
