"""Collectives: the values that the ranks of a pipeline exchange outside of its programs.

`RankCollectives` is the role. `LocalCollectives` plays it if all ranks are in one process: every call answers at once.
`ProcessCollectives` (`process_collectives.py`) plays it with one process per rank.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from pipesched.model.agreement import Facts
from pipesched.program.program import Program
from pipesched.runtime.executors.threads import Timeline
from pipesched.runtime.step_call import StepCall
from pipesched.simulation.trace import Span

__all__ = ["CONSTRUCTION", "RankCollectives", "LocalCollectives", "LossAndMetrics"]

T = TypeVar("T")

CONSTRUCTION = "the construction of a pipeline, where rank 0 measures and decides for all"

#: The loss of a mini-batch and its metrics. The metrics are None if metrics= was not passed on the sending rank.
LossAndMetrics = tuple[Tensor, dict[str, Tensor] | None]


class RankCollectives(Protocol):
    """Exchanges values between the ranks of a pipeline.

    With several processes, every method is collective, except ``holds``, the ``learn`` methods, ``enter`` and ``fail``.
    """

    def holds(self, rank: int) -> bool:
        """Return whether a rank runs in this process."""

    # ---- types of values ------------------------------------------------------------------------------------------

    def learn_types(self, *types: type) -> None:
        """Register enums and pytree nodes that this code will send, in addition to built-in types."""

    def learn_parts(self, kind: type, take: Callable[[Any], Iterable[Any]], make: Callable[..., Any]) -> None:
        """Register a type. ``take`` splits a value of this type into parts, and ``make(*parts)`` rebuilds the value."""

    def learn(self, value: Any) -> None:
        """Register the types that occur in a value. Raises ExecutionError for a type that cannot be sent."""

    # ---- agreement ------------------------------------------------------------------------------------------------

    def agreed(self, make: Callable[[], T], what: str = CONSTRUCTION) -> T:
        """Call ``make`` in one process, and return its result in all processes.

        ``what`` names the call in error messages.
        """

    def agree_on(self, facts: Callable[[], Facts], remedy: str) -> None:
        """Raise ExecutionError if the facts of the ranks differ. The error names the ranks and the facts."""

    def check_plan(self, program: Program, decided: Any) -> None:
        """Raise ExecutionError unless ``program`` and ``decided`` are the same on all ranks."""

    def enter(self, method: str) -> None:
        """Record the collective method that the user calls, for messages about ranks that call other methods."""

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raise ``error`` here, and report it to the other processes as a failure of ``what`` in this process."""

    def stopping_all(self, what: str) -> AbstractContextManager[None]:
        """A context for calls of torch.distributed. An error inside the context stops all ranks.

        ``what`` names the calls in error messages.
        """

    # ---- calls --------------------------------------------------------------------------------------------------

    def begin_call(self, method: str, *, given: bool) -> None:
        """Record the method that the user calls.

        Raises InputError if this rank passed a batch (``given``) although ``inputs=`` forbids it, or passed no batch
        although ``inputs=`` requires it.
        """

    def telling_failure(self, method: str) -> AbstractContextManager[None]:
        """A context in which this process splits the batch of a call.

        If it fails, the processes that wait for it raise an ExecutionError with the text of the error.
        """

    def exchange_call(self, method: str, call: StepCall | None, messages: Sequence[Any]) -> StepCall:
        """Return the call of this process, with the part of the batch that its stages need.

        Args:
            method: the name of the pipeline's method.
            call: the call of a process that has split a batch; None if the batch comes from rank 0.
            messages: with ``inputs="first"``, rank 0's message for each rank.

        """

    # ---- values ---------------------------------------------------------------------------------------------------

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        """Return, in all processes, the value that only one rank can compute."""

    def gathered(self, value: Any) -> list[Any]:
        """All-gather a pytree of tensors and plain values over this replica's processes. Return a list in rank order.

        Received tensors are on this process's device.
        """

    def gathered_in_all(self, value: Any) -> list[Any]:
        """All-gather a pytree of tensors and plain values over the processes of all planes, in rank order."""

    def gathered_in_plane(self, value: Any) -> dict[int, Any]:
        """All-gather values over all processes; return those of this plane, keyed by process, in ascending order."""

    def gather_over_planes(self, value: Any) -> list[Any]:
        """All-gather values over the processes of this process's tensor group; return them by tensor rank."""

    def gather_over_replicas(self, value: Any) -> list[Any]:
        """All-gather values over the processes that hold the same stages; return them in replica order.

        Raises ExecutionError if another replica's call failed before it reached ``gather_over_replicas``.
        """

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Send the values in ``given`` to ranks in other processes; return the values received from ``sources``.

        ``given`` and the result map ranks to values. ``what`` names the values in error messages.
        """

    def trade_in_all(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Like ``trade``, with processes of all replicas, for large values. Keeps no memory for later messages.

        ``given`` and the result map processes to values. Waits until the values in ``given`` have been sent.
        """

    def gather_spans(self, timelines: Iterable[Timeline]) -> list[Span]:
        """Return the spans that all ranks have measured in these timelines, in seconds on one clock."""

    # ---- losses ---------------------------------------------------------------------------------------------------

    def loss(self, rank: int, make: Callable[[], Tensor]) -> Tensor:
        """Return, in all processes, the loss that only one rank can compute.

        In the processes of the other ranks, the first use of the returned tensor waits for its value.
        """

    def loss_with_metrics(self, rank: int, value: LossAndMetrics | None) -> Callable[[], LossAndMetrics]:
        """Send one rank's loss and metrics to all other ranks. Return a function that waits for both and returns them.

        If there are several replicas, the function returns the sums over replicas.
        """

    def shared(self, value: T) -> Callable[[], list[list[T]]]:
        """Send this process's value to all others of its plane; return a function that waits for all their values.

        The function returns one list per replica, with one value per rank.
        """

    def sum_of_replicas(self, parts: Sequence[LossAndMetrics], device: torch.device) -> LossAndMetrics:
        """Add losses and metrics. ``parts`` has an entry for each replica, in replica order."""

    # ---- after close ----------------------------------------------------------------------------------------------

    def connected(self, method: str) -> AbstractContextManager["RankCollectives"]:
        """A context that yields these collectives or, after ``close``, temporary new ones. Collective.

        If a step is running, raises an error that names ``method``.
        """


class LocalCollectives:
    """The collectives of ranks that are all in this process. Nothing is sent, so every call answers at once."""

    def holds(self, rank: int) -> bool:
        return True

    def learn_types(self, *types: type) -> None:
        return

    def learn_parts(self, kind: type, take: Callable[[Any], Iterable[Any]], make: Callable[..., Any]) -> None:
        return

    def learn(self, value: Any) -> None:
        return

    def agreed(self, make: Callable[[], T], what: str = CONSTRUCTION) -> T:
        return make()

    def agree_on(self, facts: Callable[[], Facts], remedy: str) -> None:
        return

    def check_plan(self, program: Program, decided: Any) -> None:
        return

    def enter(self, method: str) -> None:
        return

    def fail(self, what: str, error: Exception) -> NoReturn:
        raise error

    def stopping_all(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_call(self, method: str, *, given: bool) -> None:
        return

    def telling_failure(self, method: str) -> AbstractContextManager[None]:
        return nullcontext()

    def exchange_call(self, method: str, call: StepCall | None, messages: Sequence[Any]) -> StepCall:
        assert call is not None
        return call

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        return make()

    def gathered(self, value: Any) -> list[Any]:
        return [value]

    def gathered_in_all(self, value: Any) -> list[Any]:
        return [value]

    def gathered_in_plane(self, value: Any) -> dict[int, Any]:
        return {0: value}

    def gather_over_planes(self, value: Any) -> list[Any]:
        return [value]

    def gather_over_replicas(self, value: Any) -> list[Any]:
        return [value]

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        return {}

    def trade_in_all(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        return {}

    def gather_spans(self, timelines: Iterable[Timeline]) -> list[Span]:
        return [span for timeline in timelines for span in timeline.spans()]

    def loss(self, rank: int, make: Callable[[], Tensor]) -> Tensor:
        return make()

    def loss_with_metrics(self, rank: int, value: LossAndMetrics | None) -> Callable[[], LossAndMetrics]:
        assert value is not None
        return lambda: value

    def shared(self, value: T) -> Callable[[], list[list[T]]]:
        return lambda: [[value]]

    def sum_of_replicas(self, parts: Sequence[LossAndMetrics], device: torch.device) -> LossAndMetrics:
        (own,) = parts
        return own

    def connected(self, method: str) -> AbstractContextManager[RankCollectives]:
        return nullcontext(self)
