"""Rank host: where a pipeline's ranks run: all in this process, or one here and the others in processes of their
own.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from threading import Lock
from typing import Any, Literal, NoReturn, Protocol, TypeVar, get_args

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh

from pipesched.capture.layered_model import LayeredModel, LayerError
from pipesched.capture.replay import Looks
from pipesched.checks import check_type
from pipesched.errors import DeviceCountError, ExecutionError, GraphError, InputError
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
from pipesched.runtime.microbatches import Batch
from pipesched.runtime.stage import batch_norm as norms
from pipesched.runtime.step_call import SENT_TYPES, StepCall, received
from pipesched.simulation.costs import Costs
from pipesched.simulation.layer_costs import LayerCosts
from pipesched.simulation.layer_memory import LayerMemory, LossMemory
from pipesched.simulation.links import Link, Links
from pipesched.simulation.overheads import Overheads
from pipesched.simulation.trace import Span
from pipesched.tensors.caller_context import Caller
from pipesched.tensors.payload import Payload
from pipesched.tensors.pending_tensor import pending
from pipesched.torch_checks import as_devices, as_timeout

__all__ = ["Executor", "Inputs", "MeshRanks", "RankHost", "SegmentedRun", "ThreadRanks", "host_for"]

T = TypeVar("T")

#: What ranks decide together is made of these, and of built-in types.
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
    Link,
    Links,
)

#: Rank 0's own call, and each rank's part of it as a message.
Deal = Callable[[StepCall], tuple[StepCall, list[Any]]]

#: Who passes a batch under a mesh: all ranks the same one, or the first rank alone.
Inputs = Literal["all", "first"]


class SegmentedRun(Protocol):
    """A run that is given its orders in parts."""

    @property
    def ahead(self) -> int:
        """How many parts may be under way while the caller goes on."""

    def hand(self, orders: Sequence[tuple[Action, ...]]) -> Any:
        """Give every rank of this process the next part of its order."""

    def finish(self, part: Any) -> Timeline:
        """Wait until they have run it: what ran when. Raises what a stage raised."""

    def abandon(self) -> None:
        """Stop all ranks."""


class Executor(Protocol):
    """What runs the ranks of this process, as far as a stream asks."""

    def caller(self, *, grad: bool) -> Caller:
        """The settings of this thread, with grad mode as given."""

    def begin(self, run_spec: RunSpec, caller: Caller) -> SegmentedRun:
        """Begin a run that is then given its orders in parts. Nothing else runs before ``end``."""

    def end(self, run: Any) -> None:
        """End it."""

    def check_outside(self, what: str) -> None:
        """Raise ExecutionError within a step."""


class RankHost(Protocol):
    """What a pipeline asks of the place where its ranks run. Collective where that is several processes.

    devices: of the ranks. all_devices: also those that no rank uses.
    """

    devices: list[torch.device]
    all_devices: list[torch.device]

    @property
    def executor(self) -> Executor:
        """What runs the ranks of this process, once started."""

    def use(self, num_ranks: int, *, all_ranks: bool = False) -> "RankHost":
        """The same host, of which so many ranks hold stages. all_ranks: none of a mesh may be left over. Raises
        DeviceCountError.
        """

    def holds(self, rank: int) -> bool:
        """Whether the rank runs in this process."""

    def agreed(self, make: Callable[[], T]) -> T:
        """What is made once, for all ranks."""

    def check(self, program: Program, decided: Any) -> None:
        """Raise ExecutionError where ranks decided differently."""

    def learn(self, model: LayeredModel, cut: StageLayers) -> None:
        """Know the types of what other ranks will send. Raises GraphError for what cannot be sent, naming its layer."""

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raise an error of this process here, and in the other processes as one of this one."""

    def start(self) -> None:
        """Start the ranks, once all that can be wrong before has been checked."""

    def call(self, method: str, given: bool, make: Callable[[], StepCall], deal: Deal) -> StepCall:
        """A call, as this process is to run it. given: whether a batch was passed here; deal: each rank's part of one.

        Raises InputError where a batch was passed or missing against ``inputs=``, what ``make`` raises, and in the
        other processes ExecutionError that says so.
        """

    def run(self, run_spec: RunSpec, batch: Batch, *, grad: bool) -> Timeline:
        """Run a program on all ranks, each its part."""

    def loss(self, rank: int, make: Callable[[], Tensor]) -> Tensor:
        """A loss that one rank can make, for all: elsewhere a tensor that waits for it once it is looked at."""

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        """What one rank can make, for all, at once."""

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        """Give values to ranks in other processes, and take what those in ``sources`` give to this one."""

    def abandon(self, what: str, error: BaseException) -> None:
        """End it, and in the other processes as a failure of this one."""

    def close(self) -> None:
        """End it."""


class ThreadRanks:
    """Every rank in this process, on a device each; a device may repeat."""

    def __init__(self, devices: Sequence[torch.device], intra_op_threads: int) -> None:
        self.devices = self.all_devices = list(devices)
        self._threads = intra_op_threads

    @cached_property
    def executor(self) -> ThreadExecutor:
        """The ranks' threads, which start with the first use."""
        return ThreadExecutor(self.devices, self._threads)

    def start(self) -> None:
        _ = self.executor

    def use(self, num_ranks: int, *, all_ranks: bool = False) -> "ThreadRanks":
        other = ThreadRanks(self.all_devices, self._threads)
        other.devices = self.all_devices[:num_ranks]  # devices that no rank needs are left alone
        return other

    def holds(self, rank: int) -> bool:
        return True

    def agreed(self, make: Callable[[], T]) -> T:
        return make()

    def check(self, program: Program, decided: Any) -> None:
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

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        return {}

    def abandon(self, what: str, error: BaseException) -> None:
        self.close()

    def close(self) -> None:
        if "executor" in vars(self):  # it has started
            self.executor.close()


class MeshRanks:
    """One rank of a one-dimensional DeviceMesh in this process, the others in theirs. All calls are collective."""

    def __init__(self, mesh: DeviceMesh, intra_op_threads: int, timeout_s: float, inputs: Inputs = "all") -> None:
        check_type(mesh, DeviceMesh, "mesh is a DeviceMesh", "pass one dimension of it, such as mesh['pp']")
        timeout_s = as_timeout(timeout_s)
        if mesh.ndim != 1:
            raise DeviceCountError(
                f"a pipeline runs along one dimension of a mesh; got one of {mesh.ndim} dimensions "
                f"({mesh.mesh_dim_names}); pass one, such as mesh['pp']"
            )
        device = torch.device(mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.devices = self.all_devices = [device] * mesh.size()
        self._inputs = inputs
        self._timeout_s = timeout_s
        self._dealing = Lock()  # what rank 0 makes may deal, too, while its heart beats
        group = mesh.get_group()
        self.group = tuple(get_process_group_ranks(group))

        def connect() -> ProcessExecutor:
            executor = ProcessExecutor(group, device=device, intra_op_threads=intra_op_threads, timeout_s=timeout_s)
            executor.encoding.know(*_DECIDED, *SENT_TYPES, *norms.SENT_TYPES)
            executor.encoding.know_own(Orders, Orders.parts, Orders.of_parts)
            executor.encoding.know_own(Looks, lambda looks: looks.values, Looks, immutable=True)
            return executor

        self._connect = connect
        self.executor = connect()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.executor.rank

    def use(self, num_ranks: int, *, all_ranks: bool = False) -> "MeshRanks":
        if all_ranks and num_ranks != len(self.all_devices):
            raise DeviceCountError(
                f"every rank of the mesh holds stages, unless a plan leaves some out; it has {len(self.all_devices)} "
                f"ranks, the program {num_ranks}; use a mesh of {num_ranks}, or a model and a schedule of more stages"
            )
        other = copy.copy(self)
        other.devices = self.all_devices[:num_ranks]  # the other ranks hold no stages, and take part in each call
        return other

    def holds(self, rank: int) -> bool:
        return rank == self.rank

    def agreed(self, make: Callable[[], T]) -> T:
        what = "making a pipeline"
        given = None
        if self.rank:
            while given is None:  # rank 0 is still at it
                given = self.executor.deal(f"{what}, where rank 0 measures and decides for all")
            result: T = given[0]
            return result
        with beating(lambda: self._deal_all(what, None), self._timeout_s):
            try:
                made = make()
            except Exception as error:  # the others wait for what is made
                if self.executor.closed:
                    raise
                with self._dealing:
                    self.executor.fail(what, error)
        self._deal_all(what, [made])
        return made

    def _deal_all(self, what: str, value: Any) -> None:
        with self._dealing:
            self.executor.deal(what, [value] * len(self.all_devices))

    def check(self, program: Program, decided: Any) -> None:
        self.executor.agree("plan", repr((str(program), self._inputs, decided)).encode())

    def learn(self, model: LayeredModel, cut: StageLayers) -> None:
        ends = {names[-1] for names in cut[:-1]}
        with closing(model.passed()) as passed, suppress(LayerError):
            for name, value in passed:
                with self._refusing(name in ends, f"what layer {name!r} gives goes from stage to stage"):
                    self.executor.learn(value)
        with self._refusing(self._inputs == "first", "with inputs='first' rank 0 sends what the sample shows"):
            self.executor.learn(model.sample)
        with self._refusing(False, ""):  # an output goes to other ranks only where that is asked for
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

    def start(self) -> None:
        return

    def call(self, method: str, given: bool, make: Callable[[], StepCall], deal: Deal) -> StepCall:
        first = self._inputs == "first"
        if given != (self.rank == 0 or not first):
            error = InputError(
                f"with inputs={self._inputs!r} {'rank 0 alone passes' if first else 'every rank passes'} a batch to "
                f"{method}; rank {self.rank} of {len(self.all_devices)} passed {'one' if given else 'none'}; "
                f"{'call it with nothing there' if given else 'pass it there'}, or change inputs="
            )
            self.executor.fail(method, error)
        if not first:
            return make()
        return self._receive(method) if self.rank else self._deal(method, make, deal)

    def _deal(self, method: str, make: Callable[[], StepCall], deal: Deal) -> StepCall:
        """Rank 0's own call, once the others' parts are on their way, or why there are none."""
        try:
            call, messages = deal(make())
        except BaseException as error:
            self.executor.deal(method, [f"{type(error).__name__}: {error}"] * len(self.all_devices))
            raise
        self.executor.deal(method, messages)
        return call

    def _receive(self, method: str) -> StepCall:
        message = self.executor.deal(method)
        if isinstance(message, str):
            raise ExecutionError(
                f"rank 0 passes the batch for all ranks; its own {method} failed before it ran, with {message}; "
                f"correct it there; the pipeline is usable"
            )
        call = received(message)
        if call.method != method:
            error = InputError(
                f"all ranks call one method at a time; rank 0 called {call.method}, rank {self.rank} {method}; "
                f"call the same methods on every rank, in the same order"
            )
            self.executor.fail(method, error)
        return call

    def run(self, run_spec: RunSpec, batch: Batch, *, grad: bool) -> Timeline:
        return self.executor.run(run_spec, grad=grad, looks=batch.looks or batch.looking(look))

    def loss(self, rank: int, make: Callable[[], Tensor]) -> Tensor:
        if self.rank == rank:
            loss = make()
            self.executor.share(rank, (loss,))
            return loss
        take = self.executor.share(rank)
        here = self.devices[rank]
        return pending(lambda: take()[0].to(here))

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        if self.rank == rank:
            made = make()
            self.executor.share(rank, Payload.of(made))
            return made
        here = self.devices[rank]
        shared: T = self.executor.share(rank)().map_tensors(lambda tensor: tensor.to(here)).value
        return shared

    def trade(self, what: str, given: Mapping[int, Any], sources: Collection[int]) -> dict[int, Any]:
        return self.executor.trade(what, given, sources) if given or sources else {}

    @contextmanager
    def connected(self) -> Iterator[ProcessExecutor]:
        """The executor; once it has ended, another one for as long as this is entered. Collective."""
        self.executor.check_outside("gather_model")
        if not self.executor.closed:
            yield self.executor
            return
        executor = self._connect()
        try:
            yield executor
        finally:
            executor.close()

    def gather(self, timelines: Iterable[Timeline]) -> list[Span]:
        """The spans of all ranks on one clock."""
        return self.executor.gather(*(own for own in timelines if isinstance(own, RankTimeline)))

    def abandon(self, what: str, error: BaseException) -> None:
        self.executor.leave(f"{type(error).__name__}: {error}, in {what}")

    def close(self) -> None:
        self.executor.close()


def host_for(
    devices: Sequence[Any] | None, mesh: DeviceMesh | None, threads: int, timeout: float | None, inputs: Inputs
) -> RankHost:
    """The host of a Pipeline with these arguments. Raises InputError, DeviceCountError, ExecutionError."""
    if inputs not in get_args(Inputs):
        raise InputError(
            f"inputs is one of {', '.join(get_args(Inputs))}; got {inputs!r}; say which ranks of a mesh pass a batch"
        )
    if devices is not None and mesh is not None:
        raise InputError("a pipeline runs on devices= of this process or over a mesh=; got both; pass one of them")
    if mesh is None:
        if timeout is not None:
            raise InputError(
                f"timeout= is of ranks in processes of their own; got {timeout!r} with devices=; leave it out"
            )
        if inputs != "all":
            raise InputError(
                f"inputs= says which ranks of a mesh pass a batch; got {inputs!r} with devices=; leave it out"
            )
        return ThreadRanks(as_devices(devices), threads)
    return MeshRanks(mesh, threads, 60.0 if timeout is None else timeout, inputs)
