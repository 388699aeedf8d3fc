"""Regrouping: lets another set of ranks run a pipeline: fewer after a loss, or more once others have joined.

The ranks connect anew over a store that one of them hosts. torch's default process group and the mesh are made anew.
The layers are divided among the ranks, and each rank gets the state of its layers from those that hold it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipesched import schedules
from pipesched.elastic.survivors import store_at
from pipesched.errors import ExecutionError, PipeschedError
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.pipeline.construction import check_idle_ranks, checked_programs
from pipesched.pipeline.cost_model import CostModel
from pipesched.pipeline.options import Distributed, Numerics
from pipesched.pipeline.plan_switch import PlanSwitch
from pipesched.pipeline.running_plan import RunningPlan
from pipesched.planning.pins import Pins
from pipesched.planning.plan_request import PlanRequest
from pipesched.planning.program_factory import ProgramFactory
from pipesched.program.checkpoint_options import Checkpoint
from pipesched.runtime.gradients.tree_sums import ReductionOrder
from pipesched.runtime.rank_grid import Axes, Inputs, dims_of
from pipesched.runtime.rank_host import RankHost, host_of_mesh
from pipesched.runtime.transport.encoding import Encoding
from pipesched.saving.saved_run import CheckpointPart
from pipesched.units import counted

__all__ = ["MeshForm", "NewGroup", "Regrouping", "SharedWork"]


@dataclass(frozen=True, kw_only=True)
class MeshForm:
    """What meshes of different sizes have in common, and the user's options for their ranks."""

    device_type: str
    #: The names of the mesh's dimensions; None if they have none.
    names: tuple[str, ...] | None
    #: The dimension of each axis ("pipeline", "replicate"), by its number.
    dims: Mapping[str, int]
    axes: Axes | None
    inputs: Inputs
    timeout_s: float
    intra_op_threads: int
    reduction_order: ReductionOrder

    @classmethod
    def of(cls, mesh: DeviceMesh | None, axes: Axes | None, numerics: Numerics, distributed: Distributed) -> "MeshForm":
        """Return the form of a mesh. A process that is about to join a job has no mesh yet."""
        return cls(
            device_type="cpu" if mesh is None else mesh.device_type,
            names=None if mesh is None else mesh.mesh_dim_names,
            dims={"pipeline": 0} if mesh is None else dims_of(mesh, axes),
            axes=axes,
            inputs=distributed.inputs,
            timeout_s=60.0 if distributed.timeout is None else distributed.timeout,
            intra_op_threads=numerics.intra_op_threads,
            reduction_order=numerics.reduction_order,
        )

    @property
    def of_mesh(self) -> dict[str, Any]:
        """What a process that joins must know of the mesh."""
        return {"device_type": self.device_type, "names": self.names, "dims": dict(self.dims), "axes": self.axes}

    def like(self, of_mesh: Mapping[str, Any]) -> "MeshForm":
        """Return this form for another mesh, as ``of_mesh`` states it."""
        names = of_mesh["names"]
        return replace(self, **{**of_mesh, "names": None if names is None else tuple(names)})

    def mesh_of(self, num_ranks: int, num_replicas: int) -> DeviceMesh:
        """Make a mesh of all processes, with this number of replicas. Collective."""
        shape = [1] * (1 + max(self.dims.values()))
        shape[self.dims["pipeline"]] = num_ranks // num_replicas
        if "replicate" in self.dims:
            shape[self.dims["replicate"]] = num_replicas
        return init_device_mesh(self.device_type, tuple(shape), mesh_dim_names=self.names)

    def allows(self, num_replicas: int) -> bool:
        """Return whether sums over this number of replicas do not depend on it, if the user wishes that."""
        return self.reduction_order != "tree" or num_replicas & (num_replicas - 1) == 0


@dataclass(frozen=True, kw_only=True)
class SharedWork:
    """The work that the ranks divide among themselves."""

    #: The name of the schedule.
    schedule: str
    #: The number of micro-batches of all replicas.
    num_microbatches: int
    #: The number of replicas so far.
    num_replicas: int
    checkpoint: Checkpoint

    @classmethod
    def of(cls, running: RunningPlan) -> "SharedWork":
        """Return the work of a running plan."""
        programs = running.assembly.programs
        num_replicas = len(running.host.grid.rows)
        return cls(
            schedule=programs.full.plain.name,
            num_microbatches=programs.num_microbatches * num_replicas,
            num_replicas=num_replicas,
            checkpoint=programs.checkpoint,
        )


@dataclass(frozen=True, kw_only=True)
class NewGroup:
    """A new set of ranks, as one of them sees it."""

    rank: int
    num_ranks: int
    #: The address of the store over which the ranks connect.
    host: str
    port: int
    #: The number of steps after which they go on.
    step: int


class Regrouping:
    """Lets another set of ranks run a pipeline.

    Args:
        running: the running plan; its contents are replaced.
        spec: the model and the user's options for its stages.
        cost_model: the known costs of layers and devices.
        switch: replaces the running plan.
        form: what the meshes have in common.

    """

    def __init__(
        self, running: RunningPlan, spec: AssemblySpec, cost_model: CostModel, switch: PlanSwitch, form: MeshForm
    ) -> None:
        self._running = running
        self._spec = spec
        self._cost_model = cost_model
        self._switch = switch
        self.form = form
        self._store: Any = None  # torch's default group uses it
        #: The slow ranks before an attempt that has not been completed, keyed by their old numbers.
        self._slow: dict[Any, float] | None = None

    def num_replicas(self, num_ranks: int, work: SharedWork) -> int:
        """Return the largest number of replicas, at most as many as so far, for these ranks and micro-batches."""
        return next(
            count
            for count in range(work.num_replicas, 0, -1)
            if num_ranks % count == 0
            and work.num_microbatches % count == 0
            and self.form.allows(count)
            and (count == 1 or num_ranks > count)  # the batch of a replica with one rank would be lost with the rank
        )

    def connect(self, group: NewGroup, work: SharedWork, store: Any, encoding: Encoding | None) -> RankHost:
        """Connect the ranks of a new group, and make torch's default group and the mesh anew. Collective.

        Args:
            group: the new group.
            work: the work of the ranks.
            store: the group's store if this process hosts it; None to reach it at its address.
            encoding: the types that earlier connections of this rank know; None if it had none.

        """
        form = self.form
        sums, backend = self._running.host.sums, "gloo"
        if sums is not None:
            sums.close()
        if distributed.is_initialized():
            backend = distributed.get_backend_config()
            distributed.destroy_process_group()
        self._store = store or store_at(group.host, group.port, form.timeout_s)
        limit = timedelta(seconds=form.timeout_s)
        distributed.init_process_group(
            backend, store=self._store, rank=group.rank, world_size=group.num_ranks, timeout=limit
        )
        host = host_of_mesh(
            form.mesh_of(group.num_ranks, self.num_replicas(group.num_ranks, work)),
            form.intra_op_threads,
            form.timeout_s,
            form.inputs,
            form.axes,
            form.reduction_order,
            encoding,
        )
        assert host.maker is not None
        host.maker.connected.survives = True
        return host

    def take_over(
        self, host: RankHost, work: SharedWork, numbers: Mapping[int, int], parts: Sequence[CheckpointPart], step: int
    ) -> None:
        """Divide the layers among the ranks, and give each the state of its layers. Collective.

        Args:
            host: the ranks.
            work: their work.
            numbers: the old number of each rank that stays -> its new number.
            parts: what this process holds of the state.
            step: the number of steps that have led to this state.

        """
        cost_model, running = self._cost_model, self._running
        if self._slow is None:
            self._slow = dict(cost_model.slow)
        cost_model.slow = {new: self._slow[old] for old, new in numbers.items() if old in self._slow}
        cost_model.regroup(host.grid, self._spec.zero)
        cost_model.agree(host.collectives.agreed(cost_model.measured))
        programs = self._programs(host, work)
        pins = Pins(list(self._spec.layers), None, running.assembly.programs.request.together)
        stage_cut = cost_model.cut_stages(host, pins, programs, None)
        host.collectives.check_plan(programs.full.plain, (stage_cut.cut, repr(programs.checkpoint)))
        self._switch.take_over(host.use(programs.num_ranks), programs, stage_cut, parts, step)
        running.step = step
        self._slow = None

    def _programs(self, host: RankHost, work: SharedWork) -> ProgramFactory:
        """Return the programs of the present schedule or, if it cannot have this number of ranks, of 1f1b."""
        failures = []
        known = set(schedules.names()) - {"searched"}
        for schedule in dict.fromkeys((work.schedule, "1f1b")):
            if schedule not in known:
                continue
            request = PlanRequest(
                schedule=schedule,
                num_microbatches=work.num_microbatches // len(host.grid.rows),
                checkpoint=work.checkpoint,
            )
            try:
                found = checked_programs(request, host.grid, self._spec)
                check_idle_ranks(self._spec, host.grid.use(found.num_ranks))
            except PipeschedError as error:
                failures.append(f"{schedule}: {error}")
            else:
                return found
        raise ExecutionError(
            f"the layers must be divided among the ranks that go on; no schedule can run on "
            f"{counted(len(host.grid.all_devices), 'rank')} ({'; '.join(failures)}); load the last checkpoint into a "
            f"new pipeline with another schedule"
        )
