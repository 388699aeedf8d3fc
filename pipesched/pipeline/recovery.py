"""Recovery: lets the ranks that live go on after a loss, from the state before the step that was lost.

The survivors agree on a version of the state, connect anew, divide the layers among themselves, and take over the state
of the lost layers from its copies. They then run the steps after this version again. The results are bit-identical to
those of a run that lost nobody.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar
from weakref import WeakMethod

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from pipesched import schedules
from pipesched.elastic.kept_calls import KeptCall, divided_anew, of_replica
from pipesched.elastic.recovered import Recovered
from pipesched.elastic.redundancy import Redundancy, SettingsChange
from pipesched.elastic.survivors import Decision, HeldLayers, Report, Survivors, store_at
from pipesched.errors import ExecutionError, InputError, PipeschedError, RankLost
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.pipeline.construction import check_idle_ranks, checked_programs
from pipesched.pipeline.cost_model import CostModel
from pipesched.pipeline.plan_switch import PlanSwitch
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.planning.pins import Pins
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.coordination.failure_alarm import Alarm
from pipesched.runtime.gradients.tree_sums import ReductionOrder
from pipesched.runtime.microbatches import GivenBatch
from pipesched.runtime.rank_grid import Axes, dims_of
from pipesched.runtime.rank_host import RankHost, host_of_mesh
from pipesched.runtime.stage.optimizers import settings_of
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.saving.live_run import LiveRun
from pipesched.saving.saved_run import CheckpointPart
from pipesched.units import counted

__all__ = ["MeshOptions", "Methods", "Recovery"]

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_KEPT_CALLS = 2  # a step may have to run again after the next one has begun


class _LostForGood(RankLost):
    """A loss after which the job cannot go on."""


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The user's options for the ranks of a mesh."""

    axes: Axes | None
    intra_op_threads: int
    reduction_order: ReductionOrder
    #: Whether a step recovers from a loss by itself.
    recovers: bool
    #: The user's function, called after each recovery.
    on_recovery: Callable[[Recovered], Any] | None


class Methods(NamedTuple):
    """The methods of a pipeline that a recovery calls."""

    #: Runs a step.
    run_step: Callable[..., Any]
    #: Looks for a faster plan before a step, if that is due.
    replan_if_due: Callable[[], None]
    #: Returns the state of the run under the running plan.
    live_run: Callable[[], LiveRun]


class Recovery:
    """Keeps a pipeline ready for the loss of a rank, and lets it go on after a loss. The constructor is collective.

    Args:
        running: the running plan; a recovery replaces its contents.
        spec: the model and the user's options for its stages.
        cost_model: the known costs of layers and devices.
        switch: replaces the running plan.
        methods: the methods of the pipeline that a recovery calls.
        mesh: the mesh of the ranks.
        options: the options for the ranks of the mesh.

    """

    def __init__(
        self,
        *,
        running: RunningPlan,
        spec: AssemblySpec,
        cost_model: CostModel,
        switch: PlanSwitch,
        methods: Methods,
        mesh: DeviceMesh,
        options: MeshOptions,
    ) -> None:
        self._running = running
        self._spec = spec
        self._cost_model = cost_model
        self._switch = switch
        self._run_step = _weak(methods.run_step)
        self._replan_if_due = _weak(methods.replan_if_due)
        self._live_run = _weak(methods.live_run)
        #: The mesh of the ranks that run the pipeline.
        self.mesh = mesh
        self._options = options
        self._redundancy: Redundancy | None = None
        self._assembly: Any = None  # whose states are copied
        self._survivors: Survivors | None = None
        self._calls: dict[int, KeptCall] = {}
        #: The micro-batches of steps that run again with another number of replicas, keyed by step.
        self._divided: dict[int, list[Any]] = {}
        #: The step that only some ranks had begun with the batches of the old replicas.
        self._late: int | None = None
        #: The last step that a rank had begun when a rank was lost. No rank looks for another plan before it.
        self._last_lost: int | None = None
        self._past: list[Alarm] = []
        #: The rank whose alarm the ranks that live use to agree; it stays while a recovery is not complete.
        self._base = self._connected
        self._returned = running.step
        self._is_whole = True
        self._store: Any = None
        self._connected.survives = True
        running.host.collectives.learn_types(SettingsChange)
        with self._connected.stopping_all("the construction of a pipeline"):
            self._begin(running.step)  # a loss in the first step is covered, too

    @property
    def _connected(self) -> ConnectedRank:
        maker = self._running.host.maker
        assert maker is not None
        return maker.connected

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(self, given: GivenBatch, metrics: Metrics | None, wanted: Mapping[str, bool]) -> Any:
        """Run a step. After a loss, recover and run it again if the user wishes that."""
        running = self._running
        grid = running.host.grid
        call = KeptCall(given, metrics, wanted, running.splitter, grid.replica, len(grid.rows))
        is_new = True  # whether the caller knows the present number of replicas
        while True:
            try:
                if self._running.step != self._last_lost:
                    self._replan_if_due()
                call = self._divided_call(call, is_new=is_new)
                return self._stepped(call)
            except RankLost as error:
                if not self._options.recovers or isinstance(error, _LostForGood):
                    raise
                replicas = len(self._running.host.grid.rows)
                self.recover(error)
                is_new = is_new and replicas == 1

    def _divided_call(self, call: KeptCall, *, is_new: bool) -> KeptCall:
        """Return the call for the batch of this process's replica, which may have changed during the call.

        ``is_new`` states whether the caller has passed the batch of this replica.
        """
        step, running = self._running.step, self._running
        divided = None if is_new else self._divided.pop(step, None)
        if self._late == step:
            self._late = None
            divided = of_replica(running.host, call.in_microbatches() if is_new else None)
            if divided is None:
                raise _LostForGood(
                    f"a step can run again only if each replica has its batch; nobody has the batch of replica "
                    f"{running.host.grid.replica} in step {step}; start the job again from the last checkpoint"
                )
        return call if divided is None else call.over(divided)

    def _stepped(self, call: KeptCall) -> Any:
        step = self._returned = self._running.step
        self._calls = {known: own for known, own in self._calls.items() if known > step - _KEPT_CALLS}
        self._calls[step] = call
        with self._connected.stopping_all("a step"):
            self._begin(step)
        result = self._run_step(call.given, call.metrics, **call.wanted)
        with self._connected.stopping_all("a step"):
            self._connected.finish_broadcast()
        if self._redundancy is not None:
            self._redundancy.finish()
        self._returned = step + 1
        self._calls[step] = call.copied()
        return result

    def _begin(self, step: int) -> None:
        running = self._running
        if running.host.grid.num_processes == 1:
            return
        if self._redundancy is None:
            self._redundancy = Redundancy(self._connected, self._make)
        if self._assembly is running.assembly:
            self._redundancy.begin(step)
        else:
            self._assembly = running.assembly
            self._redundancy.use(running.assembly.stages, self._live_run(), self._layers_of_ranks(), step)

    def _layers_of_ranks(self) -> list[list[str]]:
        """Return the layers of each rank of a replica."""
        program = self._running.program
        layers: list[list[str]] = [[] for _ in self._running.host.grid.pipeline]
        for rank, names in zip(program.placement, self._running.cut, strict=False):
            layers[rank] += names
        return layers

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A context in which the state changes as a whole, such as a load. What is kept must be complete before."""
        if self._redundancy is not None:
            with self._connected.stopping_all("a change of the state"):
                self._redundancy.wait()
        self._is_whole = False
        try:
            yield
        finally:
            self._is_whole = not self._connected.closed

    def close(self) -> None:
        """Let the alarms and the threads end."""
        if self._redundancy is not None:
            self._redundancy.end()
        for alarm in self._past:
            alarm.end()

    # ---- after a loss ----------------------------------------------------------------------------------------------

    def recover(self, error: RankLost | None = None) -> Recovered:
        """Go on with the ranks that live. Collective over the ranks that live.

        Args:
            error: the error that the loss has raised. Default: None.

        Raises:
            InputError: no rank is lost.
            RankLost: the state of a layer is lost with all its copies, or this rank was given up.

        """
        if not self._connected.closed:
            raise InputError(
                f"recover() goes on after the loss of a rank; all {self._connected.num_ranks} ranks of this pipeline "
                f"are connected; call it only after a RankLost error"
            )
        lost = 0
        while True:
            try:
                return self._recovered()
            except RankLost as again:
                lost += 1
                if isinstance(again, _LostForGood) or lost > self._connected.num_ranks:
                    raise

    def _recovered(self) -> Recovered:
        begun_s = time.perf_counter()
        connected, redundancy = self._base, self._redundancy
        if redundancy is None:
            raise _LostForGood("a rank was lost before any state was copied; start the job again")
        redundancy.settle()
        if self._survivors is None:
            layers = list(self._spec.layers)
            self._survivors = Survivors(connected.alarm, connected.store, layers, connected.timeout_s)
        survivors, waits_in = self._survivors, self._returned
        decision = survivors.agree(self._report(redundancy))
        names = [name for rank, name in enumerate(connected.grid.names) if rank not in decision.members]
        step = decision.version
        if step is None:
            raise _LostForGood(
                f"the state of each layer must be held by a rank that lives; {', '.join(names)} held the only copies "
                f"of a layer; start the job again from the last checkpoint"
            )
        parts = redundancy.parts(step, self._live_run())
        redundancy.is_frozen = True
        host = self._connect(decision, survivors.store, connected)
        assert host.maker is not None
        try:
            changes = self._exchange(host, redundancy, step, waits_in)
            self._take_over(host, decision, parts, step)
        except BaseException:
            host.maker.connected.give_up()  # the ranks agree anew over the old alarm
            raise
        redundancy.end()
        self._past.append(connected.alarm)
        self._base, self._survivors, self._assembly, self._redundancy = self._connected, None, None, None
        if host.grid.num_processes > 1:
            self._redundancy = Redundancy(self._connected, self._make, redundancy.kept)
        found = Recovered(
            lost=names,
            rank=host.grid.rank,
            num_ranks=host.grid.num_processes,
            replica=host.grid.replica,
            num_replicas=len(host.grid.rows),
            step=step,
            seconds=time.perf_counter() - begun_s,
        )
        _LOG.info("recovered before step %d: %s", step, found)
        self._change_settings(changes, step)
        for missed in range(step, waits_in):
            self._stepped(self._divided_call(self._calls[missed], is_new=False))
            self._change_settings(changes, missed + 1)
        if self._options.on_recovery is not None:
            self._options.on_recovery(found)
        return found

    def _exchange(self, host: RankHost, redundancy: Redundancy, step: int, waits_in: int) -> list[SettingsChange]:
        """Exchange what the ranks that go on must know: batches, if there were replicas, and changes of settings."""
        gather = host.collectives.gathered_in_all
        self._last_lost = last = max(gather(waits_in))
        calls = {known: call for known, call in self._calls.items() if known >= step}
        if any(call.num_replicas > 1 for call in calls.values()):
            self._divided = divided_anew(host, calls)
            self._late = None if last in self._divided else last
        return [change for own in gather(redundancy.settings_changes(step)) for change in own]

    @property
    def _make(self) -> Callable[[list[Any]], Optimizer]:
        assert self._spec.optimizer is not None
        return self._spec.optimizer

    def _report(self, redundancy: Redundancy) -> Report:
        """Return what this rank holds."""
        held = redundancy.held_layers(live=self._is_whole and not self._switch.is_moving)
        return Report([HeldLayers(*one) for one in held], self._returned)

    def _connect(self, decision: Decision, store: Any, before: ConnectedRank) -> RankHost:
        """Connect this rank to the others that go on, and make torch's default group and the mesh anew."""
        limit = timedelta(seconds=before.timeout_s)
        old = self._running.host
        if old.sums is not None:
            old.sums.close()
        backend = distributed.get_backend_config()
        distributed.destroy_process_group()
        self._store = store or store_at(decision.host, decision.port, limit)
        distributed.init_process_group(
            backend,
            store=self._store,
            rank=decision.members.index(before.rank),
            world_size=len(decision.members),
            timeout=limit,
        )
        dims = dims_of(self.mesh, self._options.axes)
        shape = [1] * self.mesh.ndim
        num_replicas = self._num_replicas(len(decision.members))
        shape[dims["pipeline"]] = len(decision.members) // num_replicas
        if "replicate" in dims:
            shape[dims["replicate"]] = num_replicas
        self.mesh = init_device_mesh(self.mesh.device_type, tuple(shape), mesh_dim_names=self.mesh.mesh_dim_names)
        host = host_of_mesh(
            self.mesh,
            self._options.intra_op_threads,
            before.timeout_s,
            before.grid.inputs,
            self._options.axes,
            self._options.reduction_order,
            before.encoding,
        )
        assert host.maker is not None
        host.maker.connected.survives = True
        return host

    def _num_replicas(self, num_ranks: int) -> int:
        """Return the largest number of replicas that these ranks, and the micro-batches, can be divided into."""
        before = len(self._running.host.grid.rows)
        total = before * self._running.assembly.programs.num_microbatches
        counts = [count for count in range(before, 0, -1) if num_ranks % count == 0 and total % count == 0]
        if self._options.reduction_order == "tree":
            counts = [count for count in counts if count & (count - 1) == 0]
        return counts[0]

    def _take_over(self, host: RankHost, decision: Decision, parts: Sequence[CheckpointPart], step: int) -> None:
        """Divide the layers among the ranks that go on, and give each the state of its layers."""
        cost_model, running = self._cost_model, self._running
        number = {rank: place for place, rank in enumerate(decision.members)}
        total = len(running.host.grid.rows) * running.assembly.programs.num_microbatches
        cost_model.slow = {number[rank]: own for rank, own in cost_model.slow.items() if rank in number}
        cost_model.regroup(host.grid, self._spec.zero)
        programs = self._programs(host, total // len(host.grid.rows))
        pins = Pins(list(self._spec.layers), None, running.assembly.programs.request.together)
        stage_cut = cost_model.cut_stages(host, pins, programs, None)
        host.collectives.check_plan(programs.full.plain, (stage_cut.cut, repr(programs.checkpoint)))
        self._switch.take_over(host.use(programs.num_ranks), programs, stage_cut, parts, step)
        running.step = step
        self._is_whole = True

    def _programs(self, host: RankHost, num_microbatches: int) -> ProgramFactory:
        """Return the programs of the present schedule for fewer ranks or, if it cannot have them, of 1f1b."""
        programs = self._running.assembly.programs
        failures = []
        known = schedules.names()
        for schedule in dict.fromkeys((programs.full.plain.name, "1f1b")):
            if schedule not in known or schedule == "searched":
                continue
            request = PlanRequest(schedule=schedule, num_microbatches=num_microbatches, checkpoint=programs.checkpoint)
            try:
                found = checked_programs(request, host.grid, self._spec)
                check_idle_ranks(self._spec, host.grid.use(found.num_ranks))
            except PipeschedError as error:
                failures.append(f"{schedule}: {error}")
            else:
                return found
        raise ExecutionError(f"no schedule can run on {counted(len(host.grid.all_devices), 'rank')} ({failures})")

    def _change_settings(self, changes: Sequence[SettingsChange], step: int) -> None:
        """Give the optimizers the learning rates and other settings that the user has changed before a step."""
        for optimizer in self._running.assembly.optimizers.values():
            for number, group in enumerate(optimizer.param_groups):
                own = settings_of(group)
                fitting = [change for change in changes if change.step == step and change.before == own]
                best = next((change for change in fitting if change.number == number), next(iter(fitting), None))
                if best is not None:
                    group.update(best.now)


def _weak(method: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls a method without keeping its object: a pipeline that is dropped must end at once."""
    of = WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> T:
        own = of()
        assert own is not None  # the object itself calls
        return own(*args, **kwargs)

    return call
