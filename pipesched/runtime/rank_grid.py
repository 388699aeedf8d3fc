"""Rank grid: where the ranks of a pipeline are: in which replica, in which process and on which device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from pipesched.checks import check_type, is_count, shown
from pipesched.devices.selection import current_device
from pipesched.errors import DeviceCountError, ExecutionError
from pipesched.runtime.coordination.rendezvous import names_of, ranks_of
from pipesched.units import counted

__all__ = ["Axes", "Inputs", "RankGrid", "Rows", "SumRanks", "dims_of", "grid_of", "own_group"]

#: Maps "pipeline", "replicate" and "shard" to names of mesh dimensions.
Axes = Mapping[str, str]

#: For each replica, the group ranks of its pipeline, in pipeline order.
Rows = tuple[tuple[int, ...], ...]

#: Which ranks of a mesh pass a batch: "all" (every rank passes the same batch) or "first" (only rank 0 passes a batch).
Inputs = Literal["all", "first"]

_KNOWN = {
    "pipeline": ("pp", "pipeline"),
    "replicate": ("dp", "dp_replicate", "replicate"),
    "shard": ("fsdp", "dp_shard", "shard"),
}


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """The ranks of a pipeline, arranged by replica and by rank within the replica's pipeline.

    All replicas run the same program, each on its own micro-batches. Ranks at the same position in different replicas
    hold the same stages. Groups of ``num_shards`` consecutive replicas may split weights among themselves. The ranks of
    several processes are numbered as in their process group ("group ranks").

    Args:
        rows: for each replica, the group ranks of its pipeline, in pipeline order.
        rank: the group rank of this process, or 0 if all ranks are in one process.
        all_devices: the device of each rank of a replica, including ranks that hold no stages.
        names: the names of the processes in error messages, by group rank.
        in_one_process: whether all ranks are threads of this process. Default: False (each rank is a process).
        num_idle: the number of ranks at the end of each pipeline that hold no stages. Default: 0.
        num_shards: the size of the mesh dimension "shard". Default: 1.
        global_ranks: the rank of each process in the whole job, by group rank. Default: none, as in one process.
        timeout_s: how long a process waits for another process, in seconds. Default: None (there is no other).
        inputs: the ranks that pass a batch. Default: "all".

    """

    rows: Rows
    rank: int
    all_devices: tuple[torch.device, ...]
    names: tuple[str, ...]
    in_one_process: bool = False
    num_idle: int = 0
    num_shards: int = 1
    global_ranks: tuple[int, ...] = ()
    timeout_s: float | None = None
    inputs: Inputs = "all"

    @classmethod
    def threads(cls, devices: Sequence[torch.device]) -> "RankGrid":
        """Return the grid of ranks that are threads of this process, each on its device."""
        row = tuple(range(len(devices))) or (0,)
        return cls(rows=(row,), rank=0, all_devices=tuple(devices), names=("this process",), in_one_process=True)

    @classmethod
    def single(cls, group: Any, *, device: torch.device | None = None, timeout_s: float = 60.0) -> "RankGrid":
        """Return the grid of a single replica that uses all ranks of a process group, by default on CPUs."""
        return cls(
            rows=(tuple(range(group.size())),),
            rank=group.rank(),
            all_devices=(device or torch.device("cpu"),) * group.size(),
            names=tuple(names_of(group)),
            global_ranks=tuple(ranks_of(group) or range(group.size())),
            timeout_s=timeout_s,
        )

    def use(self, num_ranks: int, *, all_ranks: bool = False) -> "RankGrid":
        """Return a grid of the same ranks, of which only the first ``num_ranks`` of each pipeline hold stages.

        Raises DeviceCountError if ``all_ranks`` is True but a rank of a mesh would hold no stage.
        """
        if all_ranks and not self.in_one_process and num_ranks != len(self.all_devices):
            raise DeviceCountError(
                f"without a plan, every rank of the mesh must hold stages; the mesh has "
                f"{counted(len(self.all_devices), 'rank')}, but the program uses {num_ranks}; use a mesh of "
                f"{counted(num_ranks, 'rank')}, or a model and a schedule "
                f"with more stages"
            )
        return replace(self, num_idle=max(0, len(self.all_devices) - num_ranks))

    def rows_of(self, num_replicas: int) -> Rows:
        """Return the rows of this number of replicas of the same processes.

        Raises DeviceCountError if the processes cannot be divided evenly.
        """
        ranks = [rank for row in self.rows for rank in row]
        if not is_count(num_replicas) or len(ranks) % num_replicas:
            raise DeviceCountError(
                f"replicas need equal numbers of ranks; {counted(len(ranks), 'rank')} cannot be divided into "
                f"{shown(num_replicas)} replicas; choose a number that divides {len(ranks)}"
            )
        size = len(ranks) // num_replicas
        return tuple(tuple(ranks[size * replica : size * (replica + 1)]) for replica in range(num_replicas))

    def arranged(self, rows: Rows) -> "RankGrid":
        """Return a grid of the same processes in other rows.

        Raises DeviceCountError if replicas shard weights among themselves, or if all ranks are in one process.
        """
        if rows == self.rows:
            return self
        if self.num_shards > 1 or self.in_one_process:
            has = "all ranks in one process" if self.in_one_process else f"{self.num_shards} shards of weights"
            raise DeviceCountError(
                f"ranks can be arranged anew only over a mesh whose axes= have no 'shard'; this pipeline has {has}; "
                f"leave the number of replicas unchanged"
            )
        names = _names(rows, [name.partition(" (replica ")[0] for name in self.names])
        devices = (self.all_devices[0],) * len(rows[0])
        return replace(self, rows=rows, all_devices=devices, names=names, num_idle=0)

    def holds(self, rank: int) -> bool:
        """Return whether a rank of this process's replica runs in this process."""
        return self.in_one_process or rank == self.position

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the ranks that hold stages."""
        return self.all_devices[: len(self.all_devices) - self.num_idle]

    @property
    def num_processes(self) -> int:
        """The number of processes in all replicas."""
        return len(self.names)

    @cached_property
    def replica(self) -> int:
        """The index of the replica that this process belongs to."""
        return next(index for index, row in enumerate(self.rows) if self.rank in row)

    @cached_property
    def position(self) -> int:
        """The rank of this process within its replica's pipeline."""
        return self.pipeline.index(self.rank)

    @cached_property
    def pipeline(self) -> tuple[int, ...]:
        """The group ranks of this process's replica, in pipeline order."""
        return self.rows[self.replica]

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The group ranks that hold the same stages as this process, including its own, in replica order."""
        return tuple(row[self.position] for row in self.rows)

    @cached_property
    def shard_peers(self) -> tuple[int, ...]:
        """The group ranks among ``peers`` that may split weights with this process, including this process's rank."""
        first = self.replica // self.num_shards * self.num_shards
        return self.peers[first : first + self.num_shards]

    @cached_property
    def replicas_per_batch(self) -> int:
        """The number of replicas whose rows a batch contains: all if only rank 0 passes a batch, otherwise 1."""
        return len(self.rows) if self.inputs == "first" else 1

    @cached_property
    def compares_batches(self) -> bool:
        """Whether several processes of a replica pass the same batch, which they then compare."""
        return self.inputs == "all" and not self.in_one_process and len(self.pipeline) > 1


def _names(rows: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of ranks. If there are several replicas, each name also states the replica."""
    if len(rows) == 1:
        return tuple(names)
    places = {rank: (replica, place) for replica, row in enumerate(rows) for place, rank in enumerate(row)}
    return tuple(
        f"{name} (replica {places[rank][0]}, rank {places[rank][1]} of its pipeline)" for rank, name in enumerate(names)
    )


class SumRanks(NamedTuple):
    """The groups of processes that sum tensors across replicas, each as a list of global ranks in replica order.

    Attributes:
        whole: for each position in the pipeline, the processes at this position in all replicas.
        shards: for each position in the pipeline and each shard of its weights, the processes that hold the shard.

    """

    whole: list[list[int]]
    shards: list[list[int]]

    @classmethod
    def of(cls, grid: RankGrid) -> "SumRanks":
        """Return the groups of a grid without shards."""
        whole = [[grid.global_ranks[rank] for rank in ranks] for ranks in zip(*grid.rows, strict=True)]
        return cls(whole, [[rank] for ranks in whole for rank in ranks])


def grid_of(
    mesh: DeviceMesh, axes: Axes | None, timeout_s: float, inputs: Inputs = "all"
) -> tuple[Any, RankGrid, SumRanks]:
    """Return the process group that contains the ranks of all replicas, its RankGrid and its SumRanks. Collective.

    Args:
        mesh: the mesh.
        axes: maps "pipeline", "replicate" and "shard" to names of mesh dimensions. Other dimensions are ignored.
            Default: a mesh with one dimension is a pipeline; the dimensions of any other mesh are recognised by
            their names.
        timeout_s: how long a process waits for another process, in seconds.
        inputs: the ranks that pass a batch. Default: "all".

    Raises:
        ModelTypeError: mesh is not a DeviceMesh.
        DeviceCountError: the mesh lacks a dimension that ``axes`` names, or does not contain this process.
        ExecutionError: a process does not join the group in time.

    """
    check_type(mesh, DeviceMesh, "mesh= must be a DeviceMesh", "pass one dimension of a DeviceMesh, such as mesh['pp']")
    dims = dims_of(mesh, axes)
    if len(dims) == 1:
        own = mesh.get_group(dims["pipeline"])
        grid = RankGrid.single(own, device=_own_device(mesh), timeout_s=timeout_s)
        return own, replace(grid, inputs=inputs), SumRanks([], [])
    here = mesh.get_coordinate()
    if here is None:
        raise DeviceCountError(
            f"every process that makes the pipeline must be in the mesh; global rank {distributed.get_rank()} is not "
            f"in {mesh}; make the pipeline in the processes of the mesh only"
        )
    kept = [dims[axis] for axis in ("replicate", "shard", "pipeline") if axis in dims]
    size = [mesh.mesh.shape[dims[axis]] if axis in dims else 1 for axis in ("replicate", "shard", "pipeline")]
    grids = mesh.mesh.permute(*(dim for dim in range(mesh.ndim) if dim not in kept), *kept).reshape(-1, *size)
    group = own_group(grids.flatten(1).sort().values.tolist(), timeout_s)
    members = distributed.get_process_group_ranks(group)
    ranks = next(grid for grid in grids.flatten(1, 2).tolist() if {*members} == {rank for row in grid for rank in row})
    rows = tuple(tuple(members.index(rank) for rank in row) for row in ranks)
    sums = SumRanks(
        whole=grids.flatten(1, 2).transpose(1, 2).flatten(0, 1).tolist(),
        shards=grids.permute(0, 2, 3, 1).flatten(0, 2).tolist(),
    )
    grid = RankGrid(
        rows=rows,
        rank=members.index(distributed.get_rank()),
        all_devices=(_own_device(mesh),) * len(rows[0]),
        names=_names(rows, names_of(group)),
        num_shards=size[1],
        global_ranks=tuple(members),
        timeout_s=timeout_s,
        inputs=inputs,
    )
    return group, grid, sums


def _own_device(mesh: DeviceMesh) -> torch.device:
    """Return the device of this process's rank of the mesh."""
    return current_device(mesh.device_type)


def own_group(groups: Sequence[Sequence[int]], timeout_s: float, *, new: bool = False) -> Any:
    """Make process groups from global ranks, and return this process's group. Collective over the ranks in ``groups``.

    If every process is in one of the groups, each process makes all groups, because torch names groups by a counter
    that must be the same in all processes. Otherwise each process makes only its own group.

    Args:
        groups: the global ranks of each group.
        timeout_s: how long a process waits for another process, in seconds.
        new: whether to make a new group even if it contains all processes. Default: False (return torch's default group
            instead).

    Raises:
        ExecutionError: a process of this group does not join it in time.

    """
    world = distributed.get_world_size()
    here = distributed.get_rank()
    limit = timedelta(seconds=timeout_s)
    if any(len(ranks) == world for ranks in groups) and not new:
        return distributed.group.WORLD
    if sum(map(len, groups)) < world:
        own = next(ranks for ranks in groups if here in ranks)
        try:
            return distributed.new_group(sorted(own), limit, use_local_synchronization=True)
        except distributed.DistError as error:
            raise ExecutionError(
                f"the processes of a mesh must make its process groups together; global rank {here} waited "
                f"{timeout_s:g} s for the group of ranks {sorted(own)} ({error}); pass the whole mesh with axes= "
                f"instead of a part of it, and make all earlier process groups in every process"
            ) from None
    made = [distributed.new_group(sorted(ranks), limit) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if here in ranks)


def dims_of(mesh: DeviceMesh, axes: Axes | None) -> dict[str, int]:
    """Map each axis of the mesh ("pipeline", "replicate" or "shard") to the index of its mesh dimension."""
    names = mesh.mesh_dim_names or ()
    if axes is None and mesh.ndim == 1:
        return {"pipeline": 0}
    if axes is None:
        axes = {axis: name for axis, known in _KNOWN.items() for name in names if name in known}
        if "pipeline" not in axes or len(axes) < mesh.ndim:
            raise DeviceCountError(
                f"a pipeline needs one mesh dimension for its ranks, and may use other dimensions for replicas; this "
                f"mesh has {f'the dimensions {names}' if names else f'{mesh.ndim} unnamed dimensions'}; pass one "
                f"dimension of the mesh, such as mesh['pp'], or name the axes: "
                f"axes={{'pipeline': 'pp', 'replicate': 'dp'}}"
            )
    if not isinstance(axes, Mapping) or "pipeline" not in axes or not set(axes) <= set(_KNOWN):
        raise DeviceCountError(
            f"axes= must map 'pipeline', and 'replicate' or 'shard' if there are replicas, to names of mesh "
            f"dimensions; got {shown(axes)}; for example, pass axes={{'pipeline': 'pp', 'replicate': 'dp'}}"
        )
    for axis, name in axes.items():
        if name not in names:
            raise DeviceCountError(
                f"axes= must name dimensions of the mesh; {axis!r} is {name!r}, but the mesh has the dimensions "
                f"{names}; correct the name"
            )
    if len({*axes.values()}) < len(axes):
        raise DeviceCountError(
            f"the axes of a pipeline need different mesh dimensions; got {shown(axes)}; correct axes="
        )
    return {axis: names.index(axes[axis]) for axis in _KNOWN if axis in axes}
