"""Process collectives: the values that the ranks of a pipeline exchange if each rank is a process."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial, reduce
from threading import Lock
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from pipesched.capture.replay import Looks
from pipesched.errors import ExecutionError, InputError
from pipesched.model.agreement import Facts, differences
from pipesched.program.program import Program
from pipesched.runtime.collectives import CONSTRUCTION, LossAndMetrics
from pipesched.runtime.connected_rank import ConnectedRank, DifferentError
from pipesched.runtime.coordination.heartbeat import beating
from pipesched.runtime.executors.rank_run import RankTimeline
from pipesched.runtime.executors.threads import Timeline
from pipesched.runtime.gradients.tree_sums import ReductionOrder, tree_sum
from pipesched.runtime.step_call import SENT_TYPES, StepCall, received
from pipesched.runtime.transport.channels import SHARE
from pipesched.runtime.transport.layout_predictor import digest
from pipesched.runtime.transport.message_layout import MessageLayout, describe
from pipesched.runtime.transport.rank_exchange import DEALT
from pipesched.simulation.trace import Span
from pipesched.tensors.payload import Payload
from pipesched.tensors.pending_tensor import pending

__all__ = ["ProcessCollectives"]

T = TypeVar("T")


class ProcessCollectives:
    """The collectives of ranks that are processes. Ranks are numbered within a replica of the pipeline.

    Args:
        connected: this process's rank, over whose connections values are sent.
        reduction_order: the order in which losses of replicas are added.

    """

    def __init__(self, connected: ConnectedRank, reduction_order: ReductionOrder = "sequential") -> None:
        self._connected = connected
        self._grid = connected.grid
        self._reduction_order: ReductionOrder = reduction_order
        #: Does not refer to the connections, so that a loss that uses this function does not keep them open.
        self.sum_of_replicas = partial(_sum_of_replicas, reduction_order)
        self._crossings = 0
        self._scattering = Lock()  # the heartbeat thread and rank 0's main thread both send messages
        connected.encoding.know(*SENT_TYPES)
        connected.encoding.know_own(Looks, lambda looks: looks.values, Looks, immutable=True)

    def holds(self, rank: int) -> bool:
        return self._grid.holds(rank)

    def learn_types(self, *types: type) -> None:
        self._connected.encoding.know(*types)

    def learn_parts(self, kind: type, take: Callable[[Any], Iterable[Any]], make: Callable[..., Any]) -> None:
        self._connected.encoding.know_own(kind, take, make)

    def learn(self, value: Any) -> None:
        encoding = self._connected.encoding
        with encoding.learning():
            MessageLayout(describe(Payload.of(value), encoding)[0], encoding).written()

    def agreed(self, make: Callable[[], T], what: str = CONSTRUCTION) -> T:
        given = None
        if self._connected.rank:
            while given is None:  # None is a heartbeat: rank 0 is still working
                given = self._deal(what)
            if not isinstance(given, list):
                self._connected.fail(
                    what, _other_call(self._connected.rank, f"rank 0 called a method, but this rank: {what}")
                )
            result: T = given[0]
            return result
        with beating(lambda: self._send_to_all(what, None, by_heartbeat=True), self._connected.timeout_s):
            try:
                made = make()
            except Exception as error:  # the other ranks are waiting for the result
                if self._connected.closed:
                    raise
                with self._scattering:
                    self._connected.fail(what, error)
        self._send_to_all(what, [made])
        return made

    def _send_to_all(self, what: str, value: Any, *, by_heartbeat: bool = False) -> None:
        with self._scattering:
            self._deal(what, [value] * self._connected.num_ranks, by_heartbeat=by_heartbeat)

    def check_plan(self, program: Program, decided: Any) -> None:
        with self._connected.alone("a comparison"):
            self._connected.compare("plan", digest(repr((str(program), self._grid.inputs, decided)).encode()))

    def agree_on(self, facts: Callable[[], Facts], remedy: str) -> None:
        of_rank = facts()
        with self._connected.alone("a comparison"):
            own = digest("\n".join(f"{name}: {value}" for name, value in of_rank.items()).encode())
            every = self._connected.in_all()
            if len(set(every.all_values(own))) > 1:
                said = differences(every.all_values(dict(of_rank)))
                with suppress(RuntimeError, ExecutionError):
                    every.all_values(own)  # so that no rank ends while another one receives the facts
                raise DifferentError(f"all ranks must have the same model and arguments; {said}; {remedy}")

    def fail(self, what: str, error: Exception) -> NoReturn:
        self._connected.fail(what, error)

    def enter(self, method: str) -> None:
        self._connected.activity.method = method

    def stopping_all(self, what: str) -> AbstractContextManager[None]:
        return self._connected.alone(what)

    def begin_call(self, method: str, *, given: bool) -> None:
        self._connected.activity.method = method
        first = self._grid.inputs == "first"
        rank = self._connected.rank
        if given != (rank == 0 or not first):
            who = ("only rank 0 may" if given else "rank 0 must") if first else "every rank must"
            remedy = "pass the batch on this rank, too, or make the pipeline with inputs='first'"
            if first:
                remedy = "pass the batch on rank 0"
            if given:
                remedy = "pass no batch on this rank, or make the pipeline with inputs='all'"
            error = InputError(
                f"with inputs={self._grid.inputs!r}, {who} pass a batch to {method}; rank {rank} of "
                f"{self._connected.num_ranks} passed {'a' if given else 'no'} batch; {remedy}"
            )
            self._connected.fail(method, error)

    @contextmanager
    def telling_failure(self, method: str) -> Iterator[None]:
        crossings = self._crossings
        try:
            yield
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
            if self._grid.inputs == "first":
                self._deal(method, [said] * self._connected.num_ranks)
            elif isinstance(error, Exception) and len(self._grid.rows) > 1 and self._crossings == crossings:
                self._gather_from_peers((None, said))  # the other replicas wait in gather_over_replicas
            raise

    def exchange_call(self, method: str, call: StepCall | None, messages: Sequence[Any]) -> StepCall:
        if call is None:
            return self._receive(method)
        if messages:
            self._deal(method, messages)
        return call

    def _receive(self, method: str) -> StepCall:
        message = self._deal(method)
        if isinstance(message, str):
            raise ExecutionError(
                f"rank 0 must pass a valid batch for all ranks; its call to {method} failed before the first action, "
                f"with {message}; fix the error on rank 0; the pipeline remains usable"
            )
        if not isinstance(message, tuple):
            self._connected.fail(
                method, _other_call(self._connected.rank, f"rank 0 runs batches(), but this rank {method}()")
            )
        call = received(message)
        if call.method != method:
            error = InputError(
                f"all ranks must call the same method; rank 0 called {call.method}, but rank "
                f"{self._connected.rank} called {method}; call the same methods on every rank, in the same order"
            )
            self._connected.fail(method, error)
        return call

    def loss(self, rank: int, make: Callable[[], Tensor]) -> Tensor:
        if len(self._grid.rows) > 1:
            result = self.loss_with_metrics(rank, (make(), None) if self.holds(rank) else None)
            return pending(lambda: result()[0])
        if self.holds(rank):
            loss = make()
            self._share(rank, (loss,))
            return loss
        take = self._share(rank)
        here = self._grid.all_devices[rank]
        return pending(lambda: _loss_and_metrics(take())[0].to(here))

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        if self.holds(rank):
            made = make()
            self._share(rank, Payload.of(made))
            return made
        here = self._grid.all_devices[rank]
        shared: T = self._share(rank)().map_tensors(lambda tensor: tensor.to(here)).value
        return shared

    def gathered(self, value: Any) -> list[Any]:
        with self._connected.alone("an exchange"):
            return self._connected.in_replica().all_values(value)

    def gathered_in_all(self, value: Any) -> list[Any]:
        with self._connected.alone("an exchange"):
            return self._connected.in_all().all_values(value)

    def gathered_in_plane(self, value: Any) -> dict[int, Any]:
        values = self.gathered_in_all((self._grid.plane, value))
        return {rank: own for rank, (plane, own) in enumerate(values) if plane == self._grid.plane}

    def gather_over_planes(self, value: Any) -> list[Any]:
        if not self._grid.planes:
            return [value]
        with self._connected.alone("an exchange between planes"):
            return self._connected.with_tensor_peers().all_values(value)

    def gather_over_replicas(self, value: Any) -> list[Any]:
        self._crossings += 1
        if len(self._grid.rows) == 1:
            return [value]
        replies = self._gather_from_peers((value, ""))
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
            take_all = self._share_in_all([row[rank] for row in self._grid.rows], Payload.of(value))
            return lambda: self.sum_of_replicas([_loss_and_metrics(own) for own in take_all()], here)
        if value is not None:
            self._share(rank, Payload.of(value))
            return lambda: value
        take = self._share(rank)
        return lambda: _loss_and_metrics(take())

    def shared(self, value: T) -> Callable[[], list[list[T]]]:
        rows = self._grid.rows
        take = self._share_in_all(self._grid.in_plane, Payload.of(value))

        def values() -> list[list[T]]:
            every = iter(take())
            return [[next(every).value for _ in row] for row in rows]

        return values

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Send values within this replica, and return the values received from ``sources``, keyed by rank.

        All sends come before the first receive, and no send blocks. All trades therefore complete if all ranks call
        ``trade`` in the same order. This method may be called during a run, and by ``RunSpec.prepare``. ``what`` is the
        kind of the values, as listed in ``rank_exchange``.
        """
        if not given and not sources:
            return {}
        with self._connected.stopping_all(f"an exchange of {what}"):
            return self._connected.in_replica().trade(what, given, sources)

    def trade_in_all(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        if not given and not sources:
            return {}
        with self._connected.alone(f"an exchange of {what}"):
            return self._connected.in_all().trade_once(what, given, sources)

    @contextmanager
    def connected(self, method: str) -> Iterator["ProcessCollectives"]:
        self._connected.check_outside(method)
        if not self._connected.closed:
            yield self
            return
        connected = self._connected.reconnected()
        try:
            yield ProcessCollectives(connected, self._reduction_order)
        finally:
            connected.close()

    def gather_spans(self, timelines: Iterable[Timeline]) -> list[Span]:
        own = [(one.began_s, spans) for one in timelines if isinstance(one, RankTimeline) and (spans := [*one.spans()])]
        parts = self.gathered(own)
        first_s = min((began_s for own in parts for began_s, _ in own), default=0.0)
        return [
            span._replace(start_s=span.start_s + began_s - first_s, end_s=span.end_s + began_s - first_s)
            for own in parts
            for began_s, spans in own
            for span in spans
        ]

    # ---- messages -------------------------------------------------------------------------------------------------

    def _deal(self, what: str, values: Sequence[Any] = (), *, by_heartbeat: bool = False) -> Any:
        """Scatter rank 0's ``values``, one to each rank; return this rank's value. Rank 0 does not wait.

        ``what`` names the call in error messages. ``by_heartbeat`` states whether the heartbeat's thread makes the call
        while the rank's own thread works.
        """
        with self._connected.alone(what, by_heartbeat=by_heartbeat):
            if self._connected.rank:
                return self._connected.in_all().trade(DEALT, {}, (0,))[0]
            self._connected.in_all().trade(DEALT, dict(enumerate(values[1:], 1)), ())
            return values[0]

    def _gather_from_peers(self, value: Any) -> list[Any]:
        with self._connected.alone("an exchange between replicas"):
            return self._connected.with_peers().all_values(value)

    def _share(self, source: int, value: Any = None) -> Callable[[], Any]:
        """Broadcast rank ``source``'s value in this replica; return a function that waits for and returns the value.

        This method does not wait for the value, but only one value can be in transit: if the value of the last call has
        not been read, ``_share`` and ``close`` first wait for that value. The returned function raises ExecutionError
        if a rank failed before the value arrived.
        """
        with self._connected.alone("a broadcast"):
            wire = self._connected.wire()
            self._connected.finish_broadcast()
            pipeline = self._grid.pipeline
            if not self.holds(source):
                return self._connected.receive_later(wire.ask(pipeline[source], SHARE))
            others = [rank for rank in pipeline if rank != self._grid.rank]
            self._connected.broadcast(value, lambda given: wire.tell_all(others, SHARE, given))
            return lambda: value

    def _share_in_all(self, sources: Sequence[int], value: Any) -> Callable[[], list[Any]]:
        """Broadcast the messages of some ranks to all ranks of all replicas of this plane, without waiting.

        Returns a function that waits for all messages and returns them in the order of ``sources``, a list of group
        ranks. If this rank is not in ``sources``, ``value`` is ignored. As with ``_share``, the messages of at most one
        call are in transit.
        """
        own = self._grid.rank
        with self._connected.alone("a broadcast"):
            wire = self._connected.wire()
            self._connected.finish_broadcast()
            if own in sources:
                others = [rank for rank in self._grid.in_plane if rank != own]
                self._connected.broadcast(value, lambda given: wire.tell_all(others, SHARE, given))
            takes = {rank: wire.ask(rank, SHARE) for rank in sources if rank != own}
            return self._connected.receive_later(
                lambda: [takes[rank]() if rank in takes else value for rank in sources]
            )


def _other_call(rank: int, said: str) -> InputError:
    return InputError(
        f"all ranks must call the same methods in the same order; on rank {rank}, {said}; run the same loop over "
        f"pipe.batches(...) on every rank, and leave it on every rank in the same step"
    )


def _sum_of_replicas(order: ReductionOrder, parts: Sequence[LossAndMetrics], device: torch.device) -> LossAndMetrics:
    add = tree_sum if order == "tree" else partial(reduce, torch.add)
    losses = [loss.to(device) for loss, _ in parts]
    given = [metrics for _, metrics in parts if metrics is not None]
    names = given[0] if len(given) == len(parts) else ()
    metrics = {name: add([one[name].to(device) for one in given]) for name in names}
    return add(losses), metrics if len(given) == len(parts) else None


def _loss_and_metrics(message: Any) -> LossAndMetrics:
    """Return the loss and the metrics in a message. The metrics are None if the message has none."""
    if isinstance(message, Payload):
        loss, metrics = message.value
        return loss, metrics
    return message[0], None
