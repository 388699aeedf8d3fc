"""Rank host: the ranks of a pipeline, as threads of this process or as one process per rank."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args
from weakref import ref

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from pipesched.devices.selection import as_devices
from pipesched.errors import InputError
from pipesched.parallel.process_groups import own_group, release_with
from pipesched.parallel.tensor_group import JobGroups, TensorGroup
from pipesched.parallel.traffic_counter import Traffic
from pipesched.runtime.collectives import LocalCollectives, RankCollectives
from pipesched.runtime.connected_rank import ConnectedRank
from pipesched.runtime.executors.channel_plan import look
from pipesched.runtime.executors.executor import Executor
from pipesched.runtime.executors.processes import ProcessExecutor
from pipesched.runtime.executors.threads import RunSpec, ThreadExecutor, Timeline
from pipesched.runtime.gradients.tree_sums import ReductionOrder
from pipesched.runtime.microbatches import Batch
from pipesched.runtime.process_collectives import ProcessCollectives
from pipesched.runtime.rank_grid import Axes, Inputs, RankGrid, Rows, SumRanks, grid_of
from pipesched.runtime.reductions.collective_lane import CollectiveLane
from pipesched.runtime.reductions.replica_sum import ReplicaGroup, ReplicaSums
from pipesched.runtime.transport.encoding import Encoding
from pipesched.simulation.links import Link
from pipesched.torch_checks import as_timeout

__all__ = [
    "HostMaker",
    "RankHost",
    "alone",
    "host_for",
    "host_of_group",
    "host_of_mesh",
    "host_of_threads",
    "tensor_group",
]


@dataclass(frozen=True, kw_only=True)
class RankHost:
    """The ranks of a pipeline: where they are, how they exchange values, and what runs their programs."""

    grid: RankGrid
    collectives: RankCollectives
    executor: Executor
    #: Sums gradients across replicas; None if there is one replica.
    sums: ReplicaSums | None = None
    #: Makes the host of other replicas of the same processes; None if all ranks are in one process.
    maker: "HostMaker | None" = None
    #: The processes that may split the weights of this process's layers; None if there is one plane.
    tensor: TensorGroup | None = None
    #: The slowest link between ranks of a tensor group; None if it was not measured.
    tensor_link: Link | None = None

    def alone(self) -> AbstractContextManager[None]:
        """A context in which split layers run in this process alone, without collectives of its tensor group."""
        return alone(self.tensor)

    def use(self, num_ranks: int, *, all_ranks: bool = False) -> "RankHost":
        """Return a host for the same ranks. Only the first ``num_ranks`` ranks of this host hold stages.

        Raises DeviceCountError if ``all_ranks`` is True but a rank of a mesh would hold no stage.
        """
        grid = self.grid.use(num_ranks, all_ranks=all_ranks)
        return replace(self, grid=grid, executor=self.executor.with_devices(grid.devices))

    def arranged(self, rows: Rows) -> "RankHost":
        """Return a host of the same processes in other rows, given those of the first plane. Collective.

        This host then ends.

        Raises DeviceCountError if the ranks cannot be arranged anew.
        """
        if rows == self.grid.first_rows:
            return self
        grid = self.grid.arranged(rows)
        assert self.maker is not None
        if self.sums is not None:
            self.sums.close()
        self.maker.connected.regroup(grid)
        sums = SumRanks.of(grid)._replace(tensor=[])  # the layers keep their tensor group
        return replace(self.maker.host(grid, sums), tensor=self.tensor, tensor_link=self.tensor_link)

    def run(self, run_spec: RunSpec, batch: Batch, *, grad: bool) -> Timeline:
        """Run a program on all ranks, and return the timeline of the ranks in this process."""
        looks = () if self.grid.in_one_process else _looks(batch)
        return self.executor.run(run_spec, grad=grad, looks=looks, values=batch.values)

    def close(self) -> None:
        """Stop the threads of the ranks, or close their connections."""
        self.executor.close()
        if self.sums is not None:
            self.sums.close()


def alone(tensor: TensorGroup | None, took_s: Callable[[Traffic], float] | None = None) -> AbstractContextManager[None]:
    """A context in which the layers that a tensor group splits, if there is one, run in this process alone.

    ``took_s`` is as in `TensorGroup.alone`.
    """
    return nullcontext() if tensor is None else tensor.alone(took_s)


def _looks(batch: Batch) -> Sequence[Any]:
    """Return the key of each micro-batch, from which processes predict the layouts of messages."""
    looks = batch.looks or batch.looking(look)
    if not batch.paths.paths:
        return looks
    return [(f"path {path}", own) for own, path in zip(looks, batch.paths.paths, strict=True)]


def host_of_threads(devices: Sequence[torch.device], intra_op_threads: int) -> RankHost:
    """Create a host that runs all ranks in this process, each on its device. Several ranks may share a device."""
    return RankHost(
        grid=RankGrid.threads(devices),
        collectives=LocalCollectives(),
        executor=ThreadExecutor(devices, intra_op_threads),
    )


def host_of_mesh(
    mesh: DeviceMesh,
    intra_op_threads: int,
    timeout_s: float,
    inputs: Inputs = "all",
    axes: Axes | None = None,
    reduction_order: ReductionOrder = "sequential",
    encoding: Encoding | None = None,
) -> RankHost:
    """Create a host that runs the ranks of a DeviceMesh, with one process per rank. Collective.

    Args:
        mesh: the mesh.
        intra_op_threads: the number of CPU threads per rank.
        timeout_s: how long a rank waits for another rank, in seconds.
        inputs: the ranks that pass a batch, either "all" or "first" (only rank 0).
        axes: maps "pipeline", "replicate", "shard" and "tensor" to names of mesh dimensions. Default: the dimensions
            are recognised by their names.
        reduction_order: the order in which gradients and losses of replicas are added.
        encoding: the types that earlier connections of these ranks know. Default: None (there were none).

    """
    group, grid, sums = grid_of(mesh, axes, as_timeout(timeout_s), inputs)
    connected = ConnectedRank(group, grid, encoding=encoding)
    return HostMaker(connected, intra_op_threads, reduction_order).host(grid, sums)


def host_of_group(
    group: Any,
    grid: RankGrid,
    sums: SumRanks,
    *,
    intra_op_threads: int = 1,
    reduction_order: ReductionOrder = "sequential",
) -> RankHost:
    """Create a host that runs the ranks of a process group, arranged as ``grid`` and ``sums`` state. Collective."""
    return HostMaker(ConnectedRank(group, grid), intra_op_threads, reduction_order).host(grid, sums)


@dataclass(frozen=True)
class HostMaker:
    """Makes the host of this process's rank.

    Args:
        connected: the rank, connected to the other ranks.
        intra_op_threads: the number of CPU threads per operation on this rank.
        reduction_order: the order in which gradients and losses of replicas are added.

    """

    connected: ConnectedRank
    intra_op_threads: int
    reduction_order: ReductionOrder

    def host(self, grid: RankGrid, sums: SumRanks) -> RankHost:
        """Return the host of the ranks, arranged as ``grid`` and ``sums`` state. Collective."""
        connected, order = self.connected, self.reduction_order
        host = RankHost(
            grid=grid,
            collectives=ProcessCollectives(connected, order),
            executor=ProcessExecutor(connected, self.intra_op_threads),
            maker=self,
        )
        if len(grid.rows) == 1 and not grid.planes:
            return host
        ranks = [[[grid.global_ranks[rank] for rank in row] for row in rows] for rows in grid.every_plane]
        facts = {"the ranks of the replicas": str(ranks if grid.planes else ranks[0])}
        host.collectives.agree_on(lambda: facts, "pass the same mesh= and axes= on every rank")
        if sums.tensor:
            host = replace(host, tensor=tensor_group(sums.tensor, connected))
        if len(grid.rows) == 1:
            return host
        whole = ReplicaGroup(sums.whole, connected.timeout_s, order)
        shards = whole if grid.num_shards == 1 else ReplicaGroup(sums.shards, connected.timeout_s, order)
        return replace(host, sums=ReplicaSums(whole, shards, CollectiveLane(connected.device), connected.check_peers))


def tensor_group(groups: Sequence[Sequence[int]], connected: ConnectedRank) -> TensorGroup:
    """Make the tensor group of this process. Collective over the processes of all groups.

    A collective of the group ends if any rank of the pipeline has failed. It fails if a rank of the group does not call
    it within the timeout of the pipeline.

    Args:
        groups: the global ranks of every tensor group of the mesh, by tensor rank.
        connected: this process's rank. The group does not keep it, because a model whose layers are split may outlive
            its pipeline.

    """
    here = distributed.get_rank()
    ranks = next(ranks for ranks in groups if here in ranks)
    group = own_group(groups, connected.timeout_s, new=True)
    check = partial(_check_peers, ref(connected))
    made = TensorGroup(group, rank=list(ranks).index(here), size=len(ranks), check=check)
    made.job = JobGroups(groups, connected.timeout_s)
    release_with(made, group)
    return made


def _check_peers(connected: "ref[ConnectedRank]") -> None:
    """Raise Stopped if another rank of a pipeline that still exists has failed."""
    own = connected()
    if own is not None:
        own.check_peers()


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
        return host_of_threads(as_devices(devices), threads)
    return host_of_mesh(mesh, threads, 60.0 if timeout is None else timeout, inputs, axes, reduction_order)
