"""Rank grid: arranges the ranks of a mesh into replicas of one pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from pipesched.checks import check_type, shown
from pipesched.errors import DeviceCountError, ExecutionError

__all__ = ["Axes", "RankGrid", "SumRanks", "grid_of", "own_group"]

#: Maps "pipeline", "replicate" and "shard" to names of mesh dimensions.
Axes = Mapping[str, str]

_KNOWN = {
    "pipeline": ("pp", "pipeline"),
    "replicate": ("dp", "dp_replicate", "replicate"),
    "shard": ("fsdp", "dp_shard", "shard"),
}


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """The ranks of a process group, arranged by replica and by rank within the replica's pipeline.

    All replicas run the same program, each on its own micro-batches. Ranks at the same position in different replicas
    hold the same stages. Groups of ``num_shards`` consecutive replicas may split weights among themselves.

    Args:
        rows: for each replica, the group ranks of its pipeline, in pipeline order.
        rank: the group rank of this process.
        num_shards: the size of the mesh dimension "shard". Default: 1.

    """

    rows: tuple[tuple[int, ...], ...]
    rank: int
    num_shards: int = 1

    @classmethod
    def single(cls, group: Any) -> "RankGrid":
        """Return the grid of a single replica that uses all ranks of a process group."""
        return cls(rows=(tuple(range(group.size())),), rank=group.rank())

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

    def named(self, names: Sequence[str]) -> list[str]:
        """Return the names of the group's ranks. If there are several replicas, each name also states the replica."""
        if len(self.rows) == 1:
            return [*names]
        places = {rank: (replica, place) for replica, row in enumerate(self.rows) for place, rank in enumerate(row)}
        return [
            f"{name} (replica {places[rank][0]}, rank {places[rank][1]} of its pipeline)"
            for rank, name in enumerate(names)
        ]


class SumRanks(NamedTuple):
    """The groups of processes that sum tensors across replicas, each as a list of global ranks in replica order.

    Attributes:
        whole: for each position in the pipeline, the processes at this position in all replicas.
        shards: for each position in the pipeline and each shard of its weights, the processes that hold the shard.

    """

    whole: list[list[int]]
    shards: list[list[int]]


def grid_of(mesh: DeviceMesh, axes: Axes | None, timeout_s: float) -> tuple[Any, RankGrid, SumRanks]:
    """Return the process group that contains the ranks of all replicas, its RankGrid and its SumRanks. Collective.

    Args:
        mesh: the mesh.
        axes: maps "pipeline", "replicate" and "shard" to names of mesh dimensions. Other dimensions are ignored.
            Default: a mesh with one dimension is a pipeline; the dimensions of any other mesh are recognised by
            their names.
        timeout_s: how long a process waits for another process, in seconds.

    Raises:
        ModelTypeError: mesh is not a DeviceMesh.
        DeviceCountError: the mesh lacks a dimension that ``axes`` names, or does not contain this process.
        ExecutionError: a process does not join the group in time.

    """
    check_type(mesh, DeviceMesh, "mesh= must be a DeviceMesh", "pass one dimension of a DeviceMesh, such as mesh['pp']")
    dims = _dims(mesh, axes)
    if len(dims) == 1:
        own = mesh.get_group(dims["pipeline"])
        return own, RankGrid.single(own), SumRanks([], [])
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
    return group, RankGrid(rows=rows, rank=members.index(distributed.get_rank()), num_shards=size[1]), sums


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


def _dims(mesh: DeviceMesh, axes: Axes | None) -> dict[str, int]:
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
