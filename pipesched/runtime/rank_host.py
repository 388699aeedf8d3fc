"""Rank host: one interface to a pipeline's ranks, for a single process and for one process per rank."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial, reduce
from threading import Lock
from typing import Any, Literal, NoReturn, Protocol, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh

from pipesched.capture.layered_model import LayeredModel, LayerError
from pipesched.capture.replay import Looks
from pipesched.errors import DeviceCountError, ExecutionError, GraphError, InputError
from pipesched.model.agreement import Facts
from pipesched.partitioning.result import Partition, StageLayers, StageSummary
from pipesched.planning.alternatives import Alternative
from pipesched.planning.plan import Plan, Tie
from pipesched.program.action_arrays import Columns, Orders
from pipesched.program.actions import Action
from pipesched.program.dependencies import StageGraph
from pipesched.program.program import Program
from pipesched.runtime.coordination.heartbeat import beating
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.executors.rank_run import RankTimeline
from pipesched.runtime.executors.threads import RunSpec, ThreadExecutor, Timeline
from pipesched.runtime.gradients.nonfinite_watch import Nonfinite
from pipesched.runtime.gradients.norms import GradientNorms
from pipesched.runtime.gradients.tree_sums import ReductionOrder, tree_sum
from pipesched.runtime.microbatches import Batch
from pipesched.runtime.rank_grid import Axes, RankGrid, grid_of
from pipesched.runtime.reductions.collective_lane import CollectiveLane
from pipesched.runtime.reductions.replica_sum import ReplicaGroup, ReplicaSums
from pipesched.runtime.stage import batch_norm as norms
from pipesched.runtime.step_call import SENT_TYPES, StepCall, received
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.simulation.layer_memory import LayerMemory, LossMemory
from pipesched.simulation.links import Collectives, Link, Links
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.replication import Replication
from pipesched.simulation.size_fit import Size, SizeFit
from pipesched.simulation.trace import Span
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.payload import Payload
from pipesched.tensors.pending_tensor import pending
from pipesched.torch_checks import as_devices, as_timeout
from pipesched.units import counted

__all__ = ["Executor", "Inputs", "LossAndMetrics", "MeshRanks", "RankHost", "SegmentedRun", "ThreadRanks", "host_for"]

T = TypeVar("T")

_CONSTRUCTION = "the construction of a pipeline, where rank 0 measures and decides for all"

#: The types of values that rank 0 decides and sends to the other ranks, in addition to built-in types.
_DECIDED = (
    Plan,
    Tie,
    Program,
    Columns,
    StageGraph,
    Costs,
    LayerCosts,
    LayerMemory,
    LossMemory,
    Alternative,
    Partition,
    StageSummary,
    Overheads,
    Collectives,
    Link,
    Links,
    Replication,
    Size,
    SizeFit,
)

#: Splits a call of rank 0 into rank 0's own part and a message for each rank.
Deal = Callable[[StepCall], tuple[StepCall, list[Any]]]

#: The loss of a mini-batch and its metrics. The metrics are None if metrics= was not passed on the sending rank.
LossAndMetrics = tuple[Tensor, dict[str, Tensor] | None]

#: Which ranks of a mesh pass a batch: "all" (every rank passes the same batch) or "first" (only rank 0 passes a batch).
Inputs = Literal["all", "first"]


class SegmentedRun(Protocol):
    """A run in which an executor receives the actions of each rank in parts, for example one step at a time."""

    @property
    def ahead(self) -> int:
        """The number of unfinished parts that may be queued while the caller continues."""

    def hand(self, orders: Sequence[tuple[Action, ...]]) -> Any:
        """Give each rank of this process the next part of its actions. Return a handle for ``finish``."""

    def finish(self, part: Any) -> Timeline:
        """Wait until the part with this handle has run, and return its timeline. Raises the error of a failed stage."""

    def abandon(self) -> None:
        """Stop all ranks."""


class Executor(Protocol):
    """The methods of an executor that a `Stream` of asynchronous steps uses."""

    def caller(self, *, grad: bool) -> Caller:
        """Return the calling thread's settings, such as autocast, with the grad mode set to ``grad``."""

    def begin(self, run_spec: RunSpec, caller: Caller, *, values: bytes = b"") -> SegmentedRun:
        """Begin a run that receives the actions of each rank in parts. No other run may start before ``end``.

        ``values`` is a digest of the values of the first batch, which all ranks must have; b"" if it is not compared.
        """

    def end(self, run: Any) -> None:
        """End a run that ``begin`` returned."""

    @property
    def busy(self) -> bool:
        """Whether a run is in progress."""

    @property
    def closed(self) -> bool:
        """Whether the executor is closed."""

    def check_outside(self, method: str) -> None:
        """Raise ExecutionError if the caller is inside a running step. The message names the called ``method``."""


class RankHost(Protocol):
    """The interface to a pipeline's ranks.

    With several processes, the methods that communicate are collective, except ``fail`` and ``abandon``.
    """

    #: The devices of the ranks that hold stages.
    devices: list[torch.device]
    #: All devices, including those that no rank uses.
    all_devices: list[torch.device]
    #: The ranks of each replica of the pipeline, and the position of this process among them.
    grid: RankGrid
    #: Sums gradients across replicas; None if there is one replica.
    sums: ReplicaSums | None
    #: The number of replicas whose rows a batch contains: all if only rank 0 passes a batch, otherwise 1.
    replicas_per_batch: int
    #: Whether several ranks of a replica pass the same batch, which they then compare.
    compares_batches: bool

    @property
    def timeout_s(self) -> float | None:
        """How long a rank waits for a rank of another process, in seconds; None if there is no other process."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the processes in error messages."""

    @property
    def executor(self) -> Executor:
        """The executor of this process's ranks."""

    def use(self, num_ranks: int, *, all_ranks: bool = False) -> "RankHost":
        """Return a host for the same ranks. Only the first ``num_ranks`` ranks of this host hold stages.

        Raises DeviceCountError if ``all_ranks`` is True but a rank of the mesh would hold no stage.
        """

    def holds(self, rank: int) -> bool:
        """Return whether a rank runs in this process."""

    def agreed(self, make: Callable[[], T], what: str = _CONSTRUCTION) -> T:
        """Call ``make`` in one process, and return its result in all processes.

        ``what`` names the call in error messages.
        """

    def check(self, program: Program, decided: Any) -> None:
        """Raise ExecutionError unless ``program`` and ``decided`` are the same on all ranks."""

    def agree_on(self, facts: Callable[[], Facts], remedy: str) -> None:
        """Raise ExecutionError if the facts of the ranks differ. The error names the ranks and the facts."""

    def learn(self, model: LayeredModel, cut: StageLayers) -> None:
        """Register the types of the values that stages will send. Raises GraphError for a type that cannot be sent."""

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raise ``error`` here, and report it to the other processes as a failure of ``what`` in this process."""

    def enter(self, method: str) -> None:
        """Record the collective method that the user calls, for messages about ranks that call other methods."""

    def start(self) -> None:
        """Start the ranks. Called after all checks that can be made before the ranks run."""

    def call(self, method: str, given: bool, make: Callable[[], StepCall], deal: Deal) -> StepCall:
        """Return the call that this process must run, with the part of the batch that its stages need.

        Args:
            method: the name of the pipeline's method.
            given: whether a batch was passed in this process.
            make: builds the StepCall from the batch.
            deal: splits rank 0's call into a message for each rank.

        Raises:
            InputError: if this rank passed a batch although ``inputs=`` forbids it, or passed no batch although
                ``inputs=`` requires it. If ``make`` raises an error, this process raises the same error, and the other
                processes raise an ExecutionError that contains the text of that error.

        """

    def run(self, run_spec: RunSpec, batch: Batch, *, grad: bool) -> Timeline:
        """Run a program on all ranks, and return the timeline of the ranks in this process."""

    def loss(self, rank: int, make: Callable[[], Tensor]) -> Tensor:
        """Return, in all processes, the loss that only one rank can compute.

        In the processes of the other ranks, the first use of the returned tensor waits for its value.
        """

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        """Return, in all processes, the value that only one rank can compute."""

    def gathered(self, value: Any) -> list[Any]:
        """All-gather a pytree of tensors and plain values over this replica's ranks. Return a list in rank order."""

    def gathered_in_all(self, value: Any) -> list[Any]:
        """All-gather a pytree of tensors and plain values over all replicas' ranks. Return a list in rank order."""

    def across(self, value: Any) -> list[Any]:
        """All-gather plain values over the ranks that hold the same stages; return them in replica order.

        Raises ExecutionError if another replica's call failed before it reached ``across``.
        """

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Send the values in ``given`` to ranks in other processes; return the values received from ``sources``.

        ``given`` and the result map ranks to values. ``what`` names the values in error messages.
        """

    def abandon(self, what: str, error: BaseException) -> None:
        """Close the host, and report a failure of this process to the other processes.

        If the failure of another process caused ``error``, raises an ExecutionError that names that process.
        """

    def close(self) -> None:
        """Stop the threads of the ranks, or close their connections."""


class ThreadRanks:
    """Runs all ranks in this process, each on its device. Several ranks may share a device."""

    def __init__(self, devices: Sequence[torch.device], intra_op_threads: int) -> None:
        self.devices = self.all_devices = list(devices)
        self.grid = RankGrid(rows=(tuple(range(len(self.devices))) or (0,),), rank=0)
        self.sums: ReplicaSums | None = None
        self.replicas_per_batch = 1
        self.compares_batches = False
        self.timeout_s: float | None = None
        self.names = ("this process",)
        self._threads = intra_op_threads

    @cached_property
    def executor(self) -> ThreadExecutor:
        """The executor with one thread per rank. The threads are started when this property is first read."""
        return ThreadExecutor(self.devices, self._threads)

    def enter(self, method: str) -> None:
        return

    def start(self) -> None:
        _ = self.executor

    def use(self, num_ranks: int, *, all_ranks: bool = False) -> "ThreadRanks":
        other = ThreadRanks(self.all_devices, self._threads)
        other.devices = self.all_devices[:num_ranks]  # do not start threads for the other devices
        return other

    def holds(self, rank: int) -> bool:
        return True

    def agreed(self, make: Callable[[], T], what: str = _CONSTRUCTION) -> T:
        return make()

    def check(self, program: Program, decided: Any) -> None:
        return

    def agree_on(self, facts: Callable[[], Facts], remedy: str) -> None:
        return

    def learn(self, model: LayeredModel, cut: StageLayers) -> None:
        return

    def fail(self, what: str, error: Exception) -> NoReturn:
        raise error

    def call(self, method: str, given: bool, make: Callable[[], StepCall], deal: Deal) -> StepCall:
        return make()

    def run(self, run_spec: RunSpec, batch: Batch, *, grad: bool) -> Timeline:
        return self.executor.run(run_spec, grad=grad)

    def loss(self, rank: int, make: Callable[[], Tensor]) -> Tensor:
        return make()

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        return make()

    def gathered(self, value: Any) -> list[Any]:
        return [value]

    def gathered_in_all(self, value: Any) -> list[Any]:
        return [value]

    def across(self, value: Any) -> list[Any]:
        return [value]

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        return {}

    def abandon(self, what: str, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        if "executor" in vars(self):  # if the threads have been started
            self.executor.close()


class MeshRanks:
    """Runs the ranks of a DeviceMesh, with one process per rank.

    Ranks are numbered within a replica of the pipeline. Each replica runs the same calls on its own rows of the batch.

    Args:
        mesh: the mesh.
        intra_op_threads: the number of CPU threads per rank.
        timeout_s: how long a rank waits for another rank, in seconds.
        inputs: the ranks that pass a batch, either "all" or "first" (only rank 0).
        axes: maps "pipeline", "replicate" and "shard" to names of mesh dimensions. Default: the dimensions are
            recognised by their names.
        reduction_order: the order in which gradients and losses of replicas are added.

    """

    def __init__(
        self,
        mesh: DeviceMesh,
        intra_op_threads: int,
        timeout_s: float,
        inputs: Inputs = "all",
        axes: Axes | None = None,
        reduction_order: ReductionOrder = "sequential",
    ) -> None:
        timeout_s = as_timeout(timeout_s)
        group, self.grid, sums = grid_of(mesh, axes, timeout_s)
        device = torch.device(mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.devices = self.all_devices = [device] * len(self.grid.pipeline)
        self._inputs = inputs
        self.compares_batches = inputs == "all" and len(self.grid.pipeline) > 1
        self.reduction_order: ReductionOrder = reduction_order
        self.replicas_per_batch = len(self.grid.rows) if inputs == "first" else 1
        self._crossings = 0
        self.timeout_s: float = timeout_s
        self._dealing = Lock()  # the heartbeat thread and rank 0's main thread both send messages
        members = get_process_group_ranks(group)
        #: The global ranks of this replica's pipeline.
        self.group = tuple(members[rank] for rank in self.grid.pipeline)

        def connect() -> ProcessExecutor:
            executor = ProcessExecutor(
                group, grid=self.grid, device=device, intra_op_threads=intra_op_threads, timeout_s=timeout_s
            )
            executor.encoding.know(*_DECIDED, *SENT_TYPES, *norms.SENT_TYPES, GradientNorms, Nonfinite)
            executor.encoding.know_own(Orders, Orders.parts, Orders.of_parts)
            executor.encoding.know_own(Looks, lambda looks: looks.values, Looks, immutable=True)
            return executor

        self._connect = connect
        self.executor = executor = connect()
        self.sums: ReplicaSums | None = None
        if len(self.grid.rows) > 1:
            rows = str([[members[rank] for rank in row] for row in self.grid.rows])
            executor.agree_on({"the ranks of the replicas": rows}, "pass the same mesh= and axes= on every rank")
            whole = ReplicaGroup(sums.whole, timeout_s, reduction_order)
            shards = whole if self.grid.num_shards == 1 else ReplicaGroup(sums.shards, timeout_s, reduction_order)
            self.sums = ReplicaSums(whole, shards, CollectiveLane(device, executor.now), executor.check_peers)

    @property
    def names(self) -> Sequence[str]:
        return self.executor.names

    @property
    def gets_first(self) -> bool:
        """Whether only rank 0 passes a batch."""
        return self._inputs == "first"

    @property
    def rank(self) -> int:
        """The rank of this process within its replica."""
        return self.grid.position

    def use(self, num_ranks: int, *, all_ranks: bool = False) -> "MeshRanks":
        if all_ranks and num_ranks != len(self.all_devices):
            raise DeviceCountError(
                f"without a plan, every rank of the mesh must hold stages; the mesh has "
                f"{counted(len(self.all_devices), 'rank')}, but the program uses {num_ranks}; use a mesh of "
                f"{counted(num_ranks, 'rank')}, or a model and a schedule "
                f"with more stages"
            )
        other = copy.copy(self)
        other.devices = self.all_devices[:num_ranks]  # the other ranks still take part in collective calls
        return other

    def holds(self, rank: int) -> bool:
        return rank == self.rank

    def agreed(self, make: Callable[[], T], what: str = _CONSTRUCTION) -> T:
        given = None
        if self.executor.rank:
            while given is None:  # None is a heartbeat: rank 0 is still working
                given = self.executor.deal(what)
            if not isinstance(given, list):
                self.executor.fail(
                    what, _other_call(self.executor.rank, f"rank 0 called a method, but this rank: {what}")
                )
            result: T = given[0]
            return result
        with beating(lambda: self._deal_all(what, None, by_heartbeat=True), self.timeout_s):
            try:
                made = make()
            except Exception as error:  # the other ranks are waiting for the result
                if self.executor.closed:
                    raise
                with self._dealing:
                    self.executor.fail(what, error)
        self._deal_all(what, [made])
        return made

    def _deal_all(self, what: str, value: Any, *, by_heartbeat: bool = False) -> None:
        with self._dealing:
            self.executor.deal(what, [value] * self.executor.num_ranks, by_heartbeat=by_heartbeat)

    def check(self, program: Program, decided: Any) -> None:
        self.executor.agree("plan", repr((str(program), self._inputs, decided)).encode())

    def agree_on(self, facts: Callable[[], Facts], remedy: str) -> None:
        self.executor.agree_on(facts(), remedy)

    def learn(self, model: LayeredModel, cut: StageLayers) -> None:
        ends = {names[-1] for names in cut[:-1]}
        with closing(model.passed()) as passed, suppress(LayerError):
            for name, value in passed:
                with self._refusing(name in ends, f"the output of layer {name!r} must be sent between stages"):
                    self.executor.learn(value)
        with self._refusing(self._inputs == "first", "with inputs='first', rank 0 must send the inputs to other ranks"):
            self.executor.learn(model.sample)
        with self._refusing(False, ""):  # outputs are sent only on request, so they need not be sendable
            self.executor.learn(model.output_form)

    @staticmethod
    @contextmanager
    def _refusing(strict: bool, what: str) -> Iterator[None]:
        try:
            yield
        except ExecutionError as error:
            if strict:
                raise GraphError(f"{what}; {error}") from None

    def fail(self, what: str, error: Exception) -> NoReturn:
        self.executor.fail(what, error)

    def enter(self, method: str) -> None:
        self.executor.enter(method)

    def start(self) -> None:
        return

    def call(self, method: str, given: bool, make: Callable[[], StepCall], deal: Deal) -> StepCall:
        self.executor.enter(method)
        first = self._inputs == "first"
        rank = self.executor.rank
        if given != (rank == 0 or not first):
            who = ("only rank 0 may" if given else "rank 0 must") if first else "every rank must"
            remedy = "pass the batch on this rank, too, or make the pipeline with inputs='first'"
            if first:
                remedy = "pass the batch on rank 0"
            if given:
                remedy = "pass no batch on this rank, or make the pipeline with inputs='all'"
            error = InputError(
                f"with inputs={self._inputs!r}, {who} pass a batch to {method}; rank {rank} of "
                f"{self.executor.num_ranks} passed {'a' if given else 'no'} batch; {remedy}"
            )
            self.executor.fail(method, error)
        if not first:
            return self._made(make)
        return self._receive(method) if rank else self._deal(method, make, deal)

    def _made(self, make: Callable[[], StepCall]) -> StepCall:
        """Build this replica's StepCall with ``make``.

        If ``make`` fails before it has called ``across``, report its error to the other replicas, so that their
        ``across`` raises instead of waiting.
        """
        crossings = self._crossings
        try:
            return make()
        except Exception as error:
            if len(self.grid.rows) > 1 and self._crossings == crossings:
                self.executor.exchange_with_peers((None, f"{type(error).__name__}: {error}"))
            raise

    def _deal(self, method: str, make: Callable[[], StepCall], deal: Deal) -> StepCall:
        """Send the other ranks their parts of a call, or the error that ``make`` raised; return rank 0's own part."""
        try:
            call, messages = deal(make())
        except BaseException as error:
            self.executor.deal(method, [f"{type(error).__name__}: {error}"] * self.executor.num_ranks)
            raise
        self.executor.deal(method, messages)
        return call

    def _receive(self, method: str) -> StepCall:
        message = self.executor.deal(method)
        if isinstance(message, str):
            raise ExecutionError(
                f"rank 0 must pass a valid batch for all ranks; its call to {method} failed before the first action, "
                f"with {message}; fix the error on rank 0; the pipeline remains usable"
            )
        if not isinstance(message, tuple):
            self.executor.fail(
                method, _other_call(self.executor.rank, f"rank 0 runs batches(), but this rank {method}()")
            )
        call = received(message)
        if call.method != method:
            error = InputError(
                f"all ranks must call the same method; rank 0 called {call.method}, but rank "
                f"{self.executor.rank} called {method}; call the same methods on every rank, in the same order"
            )
            self.executor.fail(method, error)
        return call

    def run(self, run_spec: RunSpec, batch: Batch, *, grad: bool) -> Timeline:
        looks = batch.looks or batch.looking(look)
        if batch.paths.paths:
            looks = [(f"path {path}", own) for own, path in zip(looks, batch.paths.paths, strict=True)]
        return self.executor.run(run_spec, grad=grad, looks=looks, values=batch.values)

    def loss(self, rank: int, make: Callable[[], Tensor]) -> Tensor:
        if len(self.grid.rows) > 1:
            result = self.loss_with_metrics(rank, (make(), None) if self.rank == rank else None)
            return pending(lambda: result()[0])
        if self.rank == rank:
            loss = make()
            self.executor.share(rank, (loss,))
            return loss
        take = self.executor.share(rank)
        here = self.devices[rank]
        return pending(lambda: _loss_and_metrics(take())[0].to(here))

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        if self.rank == rank:
            made = make()
            self.executor.share(rank, Payload.of(made))
            return made
        here = self.devices[rank]
        shared: T = self.executor.share(rank)().map_tensors(lambda tensor: tensor.to(here)).value
        return shared

    def gathered(self, value: Any) -> list[Any]:
        return self.executor.exchange(value)

    def gathered_in_all(self, value: Any) -> list[Any]:
        return self.executor.exchange_in_all(value)

    def across(self, value: Any) -> list[Any]:
        self._crossings += 1
        if len(self.grid.rows) == 1:
            return [value]
        replies = self.executor.exchange_with_peers((value, ""))
        for replica, (_, failure) in enumerate(replies):
            if failure:
                raise ExecutionError(
                    f"all replicas must pass a valid batch; replica {replica} of {len(self.grid.rows)} failed before "
                    f"the first action, with {failure}; fix the error in that replica; the pipeline remains usable"
                )
        return [given for given, _ in replies]

    def loss_with_metrics(self, rank: int, value: LossAndMetrics | None) -> Callable[[], LossAndMetrics]:
        """Send one rank's loss and metrics to all other ranks. Return a function that waits for both and returns them.

        If there are several replicas, the function returns the sums over replicas.
        """
        here = self.devices[rank]
        if len(self.grid.rows) > 1:
            take_all = self.executor.share_in_all([row[rank] for row in self.grid.rows], Payload.of(value))
            return lambda: summed([_loss_and_metrics(own) for own in take_all()], here, self.reduction_order)
        if value is not None:
            self.executor.share(rank, Payload.of(value))
            return lambda: value
        take = self.executor.share(rank)
        return lambda: _loss_and_metrics(take())

    def shared(self, value: T) -> Callable[[], list[list[T]]]:
        """Send this rank's value to all other ranks; return a function that waits for the values of all ranks.

        The function returns one list per replica, with one value per rank.
        """
        rows = self.grid.rows
        take = self.executor.share_in_all([rank for row in rows for rank in row], Payload.of(value))

        def values() -> list[list[T]]:
            every = iter(take())
            return [[next(every).value for _ in row] for row in rows]

        return values

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        return self.executor.trade(what, given, sources) if given or sources else {}

    @contextmanager
    def connected(self, method: str = "gather_model") -> Iterator[ProcessExecutor]:
        """A context that yields the executor, or a temporary new one if the executor is closed. Collective.

        If a step is running, raises an error that names ``method``.
        """
        self.executor.check_outside(method)
        if not self.executor.closed:
            yield self.executor
            return
        executor = self._connect()
        try:
            yield executor
        finally:
            executor.close()

    def gather(self, timelines: Iterable[Timeline]) -> list[Span]:
        """Return the spans that all ranks have measured in these timelines, with all times on one clock."""
        return self.executor.gather(*(own for own in timelines if isinstance(own, RankTimeline)))

    def abandon(self, what: str, error: BaseException) -> None:
        self.executor.leave_after(error, what)

    def close(self) -> None:
        self.executor.close()
        if self.sums is not None:
            self.sums.close()


def _other_call(rank: int, said: str) -> InputError:
    return InputError(
        f"all ranks must call the same methods in the same order; on rank {rank}, {said}; run the same loop over "
        f"pipe.batches(...) on every rank, and leave it on every rank in the same step"
    )


def summed(parts: Sequence[LossAndMetrics], device: torch.device, order: ReductionOrder) -> LossAndMetrics:
    """Add the losses and the metrics of all replicas. ``parts`` has an entry for each replica, in replica order."""
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


def host_for(
    devices: Sequence[Any] | None,
    mesh: DeviceMesh | None,
    threads: int,
    timeout: float | None,
    inputs: Inputs,
    axes: Axes | None = None,
    reduction_order: ReductionOrder = "sequential",
) -> RankHost:
    """Create a Pipeline's host from the Pipeline's arguments. Raises InputError, DeviceCountError or ExecutionError."""
    if inputs not in get_args(Inputs):
        raise InputError(
            f"inputs= must be one of {', '.join(get_args(Inputs))}; got {inputs!r}; pass 'all' if every rank "
            f"passes the batch, or 'first' if only rank 0 does"
        )
    if devices is not None and mesh is not None:
        raise InputError(
            "a pipeline must run either on devices= of this process or over a mesh=; both were passed; pass only one"
        )
    if mesh is None:
        if timeout is not None:
            raise InputError(
                f"timeout= may only be passed with a mesh=; timeout is {timeout!r} without a mesh; leave timeout= out"
            )
        if inputs != "all":
            raise InputError(
                f"inputs= may only be passed with a mesh=; inputs is {inputs!r} without a mesh; leave inputs= out"
            )
        if axes is not None:
            raise InputError(f"axes= may only be passed with a mesh=; axes is {axes!r} without a mesh; leave axes= out")
        return ThreadRanks(as_devices(devices), threads)
    return MeshRanks(mesh, threads, 60.0 if timeout is None else timeout, inputs, axes, reduction_order)
