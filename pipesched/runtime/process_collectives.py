"""Process collectives: the values that the ranks of a pipeline exchange if each rank is a process."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from threading import Lock
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from pipesched.capture.replay import Looks
from pipesched.errors import ExecutionError, InputError
from pipesched.model.agreement import Facts
from pipesched.program.program import Program
from pipesched.runtime.collectives import CONSTRUCTION, LossAndMetrics
from pipesched.runtime.coordination.heartbeat import beating
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.executors.rank_run import RankTimeline
from pipesched.runtime.executors.threads import Timeline
from pipesched.runtime.gradients.tree_sums import ReductionOrder, tree_sum
from pipesched.runtime.step_call import SENT_TYPES, ScatterCall, StepCall, received
from pipesched.simulation.trace import Span
from pipesched.tensors.payload import Payload
from pipesched.tensors.pending_tensor import pending

__all__ = ["ProcessCollectives"]

T = TypeVar("T")


class ProcessCollectives:
    """The collectives of ranks that are processes. Ranks are numbered within a replica of the pipeline.

    Args:
        executor: the executor of this process's rank, over whose connections values are sent.
        reduction_order: the order in which losses of replicas are added.

    """

    def __init__(self, executor: ProcessExecutor, reduction_order: ReductionOrder = "sequential") -> None:
        self._executor = executor
        self._grid = executor.grid
        self._reduction_order: ReductionOrder = reduction_order
        self._crossings = 0
        self._scattering = Lock()  # the heartbeat thread and rank 0's main thread both send messages
        executor.encoding.know(*SENT_TYPES)
        executor.encoding.know_own(Looks, lambda looks: looks.values, Looks, immutable=True)

    def holds(self, rank: int) -> bool:
        return self._grid.holds(rank)

    def learn_types(self, *types: type) -> None:
        self._executor.encoding.know(*types)

    def learn_parts(self, kind: type, take: Callable[[Any], Iterable[Any]], make: Callable[..., Any]) -> None:
        self._executor.encoding.know_own(kind, take, make)

    def learn(self, value: Any) -> None:
        self._executor.learn(value)

    def agreed(self, make: Callable[[], T], what: str = CONSTRUCTION) -> T:
        given = None
        if self._executor.rank:
            while given is None:  # None is a heartbeat: rank 0 is still working
                given = self._executor.deal(what)
            if not isinstance(given, list):
                self._executor.fail(
                    what, _other_call(self._executor.rank, f"rank 0 called a method, but this rank: {what}")
                )
            result: T = given[0]
            return result
        with beating(lambda: self._send_to_all(what, None, by_heartbeat=True), self._executor.timeout_s):
            try:
                made = make()
            except Exception as error:  # the other ranks are waiting for the result
                if self._executor.closed:
                    raise
                with self._scattering:
                    self._executor.fail(what, error)
        self._send_to_all(what, [made])
        return made

    def _send_to_all(self, what: str, value: Any, *, by_heartbeat: bool = False) -> None:
        with self._scattering:
            self._executor.deal(what, [value] * self._executor.num_ranks, by_heartbeat=by_heartbeat)

    def check_plan(self, program: Program, decided: Any) -> None:
        self._executor.agree("plan", repr((str(program), self._grid.inputs, decided)).encode())

    def agree_on(self, facts: Callable[[], Facts], remedy: str) -> None:
        self._executor.agree_on(facts(), remedy)

    def fail(self, what: str, error: Exception) -> NoReturn:
        self._executor.fail(what, error)

    def enter(self, method: str) -> None:
        self._executor.enter(method)

    def stopping_all(self, what: str) -> AbstractContextManager[None]:
        return self._executor.stopping_all(what)

    def agreed_call(self, method: str, given: bool, make: Callable[[], StepCall], scatter: ScatterCall) -> StepCall:
        self._executor.enter(method)
        first = self._grid.inputs == "first"
        rank = self._executor.rank
        if given != (rank == 0 or not first):
            who = ("only rank 0 may" if given else "rank 0 must") if first else "every rank must"
            remedy = "pass the batch on this rank, too, or make the pipeline with inputs='first'"
            if first:
                remedy = "pass the batch on rank 0"
            if given:
                remedy = "pass no batch on this rank, or make the pipeline with inputs='all'"
            error = InputError(
                f"with inputs={self._grid.inputs!r}, {who} pass a batch to {method}; rank {rank} of "
                f"{self._executor.num_ranks} passed {'a' if given else 'no'} batch; {remedy}"
            )
            self._executor.fail(method, error)
        if not first:
            return self._made(make)
        return self._receive(method) if rank else self._scatter(method, make, scatter)

    def _made(self, make: Callable[[], StepCall]) -> StepCall:
        """Build this replica's StepCall with ``make``.

        If ``make`` fails before it has called ``gather_over_replicas``, report its error to the other replicas, so that
        their ``gather_over_replicas`` raises instead of waiting.
        """
        crossings = self._crossings
        try:
            return make()
        except Exception as error:
            if len(self._grid.rows) > 1 and self._crossings == crossings:
                self._executor.exchange_with_peers((None, f"{type(error).__name__}: {error}"))
            raise

    def _scatter(self, method: str, make: Callable[[], StepCall], scatter: ScatterCall) -> StepCall:
        """Send the other ranks their parts of a call, or the error that ``make`` raised; return rank 0's own part."""
        try:
            call, messages = scatter(make())
        except BaseException as error:
            self._executor.deal(method, [f"{type(error).__name__}: {error}"] * self._executor.num_ranks)
            raise
        self._executor.deal(method, messages)
        return call

    def _receive(self, method: str) -> StepCall:
        message = self._executor.deal(method)
        if isinstance(message, str):
            raise ExecutionError(
                f"rank 0 must pass a valid batch for all ranks; its call to {method} failed before the first action, "
                f"with {message}; fix the error on rank 0; the pipeline remains usable"
            )
        if not isinstance(message, tuple):
            self._executor.fail(
                method, _other_call(self._executor.rank, f"rank 0 runs batches(), but this rank {method}()")
            )
        call = received(message)
        if call.method != method:
            error = InputError(
                f"all ranks must call the same method; rank 0 called {call.method}, but rank "
                f"{self._executor.rank} called {method}; call the same methods on every rank, in the same order"
            )
            self._executor.fail(method, error)
        return call

    def loss(self, rank: int, make: Callable[[], Tensor]) -> Tensor:
        if len(self._grid.rows) > 1:
            result = self.loss_with_metrics(rank, (make(), None) if self.holds(rank) else None)
            return pending(lambda: result()[0])
        if self.holds(rank):
            loss = make()
            self._executor.share(rank, (loss,))
            return loss
        take = self._executor.share(rank)
        here = self._grid.all_devices[rank]
        return pending(lambda: _loss_and_metrics(take())[0].to(here))

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        if self.holds(rank):
            made = make()
            self._executor.share(rank, Payload.of(made))
            return made
        here = self._grid.all_devices[rank]
        shared: T = self._executor.share(rank)().map_tensors(lambda tensor: tensor.to(here)).value
        return shared

    def gathered(self, value: Any) -> list[Any]:
        return self._executor.exchange(value)

    def gathered_in_all(self, value: Any) -> list[Any]:
        return self._executor.exchange_in_all(value)

    def gather_over_replicas(self, value: Any) -> list[Any]:
        self._crossings += 1
        if len(self._grid.rows) == 1:
            return [value]
        replies = self._executor.exchange_with_peers((value, ""))
        for replica, (_, failure) in enumerate(replies):
            if failure:
                raise ExecutionError(
                    f"all replicas must pass a valid batch; replica {replica} of {len(self._grid.rows)} failed before "
                    f"the first action, with {failure}; fix the error in that replica; the pipeline remains usable"
                )
        return [given for given, _ in replies]

    def loss_with_metrics(self, rank: int, value: LossAndMetrics | None) -> Callable[[], LossAndMetrics]:
        here = self._grid.all_devices[rank]
        if len(self._grid.rows) > 1:
            take_all = self._executor.share_in_all([row[rank] for row in self._grid.rows], Payload.of(value))
            return lambda: self.sum_of_replicas([_loss_and_metrics(own) for own in take_all()], here)
        if value is not None:
            self._executor.share(rank, Payload.of(value))
            return lambda: value
        take = self._executor.share(rank)
        return lambda: _loss_and_metrics(take())

    def shared(self, value: T) -> Callable[[], list[list[T]]]:
        rows = self._grid.rows
        take = self._executor.share_in_all([rank for row in rows for rank in row], Payload.of(value))

        def values() -> list[list[T]]:
            every = iter(take())
            return [[next(every).value for _ in row] for row in rows]

        return values

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        return self._executor.trade(what, given, sources) if given or sources else {}

    def sum_of_replicas(self, parts: Sequence[LossAndMetrics], device: torch.device) -> LossAndMetrics:
        add = tree_sum if self._reduction_order == "tree" else partial(reduce, torch.add)
        losses = [loss.to(device) for loss, _ in parts]
        given = [metrics for _, metrics in parts if metrics is not None]
        names = given[0] if len(given) == len(parts) else ()
        metrics = {name: add([one[name].to(device) for one in given]) for name in names}
        return add(losses), metrics if len(given) == len(parts) else None

    @contextmanager
    def connected(self, method: str) -> Iterator["ProcessCollectives"]:
        self._executor.check_outside(method)
        if not self._executor.closed:
            yield self
            return
        executor = self._executor.reconnected()
        try:
            yield ProcessCollectives(executor, self._reduction_order)
        finally:
            executor.close()

    def gather_spans(self, timelines: Iterable[Timeline]) -> list[Span]:
        return self._executor.gather(*(own for own in timelines if isinstance(own, RankTimeline)))


def _other_call(rank: int, said: str) -> InputError:
    return InputError(
        f"all ranks must call the same methods in the same order; on rank {rank}, {said}; run the same loop over "
        f"pipe.batches(...) on every rank, and leave it on every rank in the same step"
    )


def _loss_and_metrics(message: Any) -> LossAndMetrics:
    """Return the loss and the metrics in a message. The metrics are None if the message has none."""
    if isinstance(message, Payload):
        loss, metrics = message.value
        return loss, metrics
    return message[0], None
