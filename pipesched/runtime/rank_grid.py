"""Rank grid: where the ranks of a pipeline are: in which replica, in which process and on which device.

If the ranks of a mesh split the weights of layers, too, the processes form planes. Each plane has all replicas of the
pipeline, and runs the same program on the same batches with its own blocks of the split weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from pipesched.checks import check_type, is_count, shown
from pipesched.devices.selection import current_device
from pipesched.errors import DeviceCountError
from pipesched.parallel.process_groups import own_group
from pipesched.runtime.coordination.rendezvous import names_of, ranks_of
from pipesched.units import counted

__all__ = ["Axes", "Inputs", "RankGrid", "Rows", "SumRanks", "dims_of", "grid_of"]

#: Maps "pipeline", "replicate", "shard" and "tensor" to names of mesh dimensions.
Axes = Mapping[str, str]

#: For each replica, the group ranks of its pipeline, in pipeline order.
Rows = tuple[tuple[int, ...], ...]

#: Which ranks of a mesh pass a batch: "all" (every rank passes the same batch) or "first" (only rank 0 passes a batch).
Inputs = Literal["all", "first"]

_KNOWN = {
    "pipeline": ("pp", "pipeline"),
    "replicate": ("dp", "dp_replicate", "replicate"),
    "shard": ("fsdp", "dp_shard", "shard"),
    "tensor": ("tp", "tensor"),
}
#: The axes in the order in which the ranks of a grid are arranged: by plane, by replica, then along the pipeline.
_ORDER = ("tensor", "replicate", "shard", "pipeline")


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """The ranks of a pipeline, arranged by replica and by rank within the replica's pipeline.

    All replicas run the same program, each on its own micro-batches. Ranks at the same position in different replicas
    hold the same stages. Groups of ``num_shards`` consecutive replicas may split weights among themselves. The ranks of
    several processes are numbered as in their process group ("group ranks").

    If layers are split over ranks, the processes form several planes. The replicas and their ranks are then those of
    this process's plane. Ranks at the same place (replica and position) in different planes hold different blocks of
    the same stages, and form a tensor group.

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
        planes: the rows of each plane, by tensor rank. Default: () (layers are not split over ranks).

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
    planes: tuple[Rows, ...] = ()

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
        """Return the rows of this number of replicas of the same processes, in the first plane.

        Raises DeviceCountError if the processes cannot be divided evenly.
        """
        ranks = [*chain(*self.first_rows)]
        if not is_count(num_replicas) or len(ranks) % num_replicas:
            raise DeviceCountError(
                f"replicas need equal numbers of ranks; {counted(len(ranks), 'rank')} cannot be divided into "
                f"{shown(num_replicas)} replicas; choose a number that divides {len(ranks)}"
            )
        size = len(ranks) // num_replicas
        return tuple(tuple(ranks[size * replica : size * (replica + 1)]) for replica in range(num_replicas))

    def arranged(self, rows: Rows) -> "RankGrid":
        """Return a grid of the same processes in other rows, which are those of the first plane.

        The other planes are arranged alike, so that each process keeps its tensor group. Raises DeviceCountError if
        replicas shard weights among themselves, or if all ranks are in one process.
        """
        if rows == self.first_rows:
            return self
        if self.num_shards > 1 or self.in_one_process:
            has = "all ranks in one process" if self.in_one_process else f"{self.num_shards} shards of weights"
            raise DeviceCountError(
                f"ranks can be arranged anew only over a mesh whose axes= have no 'shard'; this pipeline has {has}; "
                f"leave the number of replicas unchanged"
            )
        planes = tuple(self._moved(rows, plane) for plane in self.every_plane)
        names = _names(planes, [name.partition(" (replica ")[0] for name in self.names])
        return replace(
            self,
            rows=planes[self.plane],
            all_devices=(self.all_devices[0],) * len(rows[0]),
            names=names,
            num_idle=0,
            planes=planes if self.planes else (),
        )

    def _moved(self, rows: Rows, plane: Rows) -> Rows:
        """Return rows of the first plane with each rank replaced by the rank at its place in another plane."""
        peer = dict(zip(chain(*self.first_rows), chain(*plane), strict=True))
        return tuple(tuple(peer[rank] for rank in row) for row in rows)

    def holds(self, rank: int) -> bool:
        """Return whether a rank of this process's replica runs in this process."""
        return self.in_one_process or rank == self.position

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the ranks that hold stages."""
        return self.all_devices[: len(self.all_devices) - self.num_idle]

    @property
    def num_processes(self) -> int:
        """The number of processes in all replicas of all planes."""
        return len(self.names)

    @property
    def every_plane(self) -> tuple[Rows, ...]:
        """The rows of each plane, by tensor rank. If layers are not split over ranks, there is one plane."""
        return self.planes or (self.rows,)

    @property
    def first_rows(self) -> Rows:
        """The rows of the first plane. The rows of a plan are these in all processes."""
        return self.every_plane[0]

    @cached_property
    def plane(self) -> int:
        """The plane of this process: its tensor rank."""
        return next(index for index, rows in enumerate(self.every_plane) if self.rank in chain(*rows))

    @cached_property
    def tensor_peers(self) -> tuple[int, ...]:
        """The group ranks at this process's place in all planes, including its own, by tensor rank."""
        return tuple(rows[self.replica][self.position] for rows in self.every_plane)

    def ranks_at(self, position: int) -> tuple[int, ...]:
        """Return the group ranks at a position of the pipeline, in all replicas of all planes."""
        return tuple(row[position] for rows in self.every_plane for row in rows)

    def in_first_plane(self, rank: int) -> int:
        """Return the group rank in the first plane at the place of another group rank."""
        rows = next(rows for rows in self.every_plane if rank in chain(*rows))
        return dict(zip(chain(*rows), chain(*self.first_rows), strict=True))[rank]

    @property
    def in_plane(self) -> tuple[int, ...]:
        """The group ranks of this process's plane, replica by replica."""
        return tuple(chain(*self.rows))

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
        """The group ranks that hold the same weights as this process, including its own, in replica order."""
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
        """Whether several processes pass the same batch, which they then compare."""
        return self.inputs == "all" and not self.in_one_process and len(self.pipeline) * len(self.every_plane) > 1


def _names(planes: Sequence[Rows], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of ranks. If there are several replicas or planes, each name also states the rank's place."""
    if len(planes) == len(planes[0]) == 1:
        return tuple(names)
    suffixes = {
        rank: f" (replica {replica}, rank {place} of its pipeline{f', tensor rank {plane}' * (len(planes) > 1)})"
        for plane, rows in enumerate(planes)
        for replica, row in enumerate(rows)
        for place, rank in enumerate(row)
    }
    return tuple(name + suffixes[rank] for rank, name in enumerate(names))


class SumRanks(NamedTuple):
    """The groups of processes that run collectives of torch, each as a list of global ranks.

    They are the groups of all planes, because every process of a mesh makes all groups in the same order.

    Attributes:
        whole: for each plane and position in the pipeline, the processes there in all replicas, in replica order.
        shards: for each of these groups and each shard of its weights, the processes that hold the shard.
        tensor: for each replica and position, the processes there in all planes, by tensor rank. Default: [] (layers
            are not split over ranks).

    """

    whole: list[list[int]]
    shards: list[list[int]]
    tensor: list[list[int]] = []  # noqa: RUF012  never changed

    @classmethod
    def of(cls, grid: RankGrid) -> "SumRanks":
        """Return the groups of a grid without shards."""
        columns = [column for rows in grid.every_plane for column in zip(*rows, strict=True)]
        whole = [[grid.global_ranks[rank] for rank in column] for column in columns]
        places = zip(*(chain(*rows) for rows in grid.every_plane), strict=True) if grid.planes else ()
        tensor = [[grid.global_ranks[rank] for rank in place] for place in places]
        return cls(whole, [[rank] for ranks in whole for rank in ranks], tensor)


def grid_of(
    mesh: DeviceMesh, axes: Axes | None, timeout_s: float, inputs: Inputs = "all"
) -> tuple[Any, RankGrid, SumRanks]:
    """Return the process group that contains the ranks of all replicas, its RankGrid and its SumRanks. Collective.

    Args:
        mesh: the mesh.
        axes: maps "pipeline", "replicate", "shard" and "tensor" to names of mesh dimensions. Other dimensions are
            ignored. Default: a mesh with one dimension is a pipeline; the dimensions of any other mesh are recognised
            by their names.
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
    kept = [dims[axis] for axis in _ORDER if axis in dims]
    size = [mesh.mesh.shape[dims[axis]] if axis in dims else 1 for axis in _ORDER]
    grids = mesh.mesh.permute(*(dim for dim in range(mesh.ndim) if dim not in kept), *kept).reshape(-1, *size)
    group = own_group(grids.flatten(1).sort().values.tolist(), timeout_s)
    members = distributed.get_process_group_ranks(group)
    ranks = next(grid for grid in grids.flatten(2, 3).tolist() if {*members} == {*chain(*chain(*grid))})
    planes = tuple(tuple(tuple(members.index(rank) for rank in row) for row in rows) for rows in ranks)
    _check_ascending(grids.permute(0, 2, 3, 4, 1).flatten(0, 3).tolist())
    by_position = grids.flatten(2, 3).transpose(2, 3)
    sums = SumRanks(
        whole=by_position.flatten(0, 2).tolist(),
        shards=grids.permute(0, 1, 3, 4, 2).flatten(0, 3).tolist(),
        tensor=grids.permute(0, 2, 3, 4, 1).flatten(0, 3).tolist() if "tensor" in dims else [],
    )
    rank = members.index(distributed.get_rank())
    grid = RankGrid(
        rows=next(rows for rows in planes if rank in chain(*rows)),
        rank=rank,
        all_devices=(_own_device(mesh),) * size[-1],
        names=_names(planes, names_of(group)),
        num_shards=size[2],
        global_ranks=tuple(members),
        timeout_s=timeout_s,
        inputs=inputs,
        planes=planes if "tensor" in dims else (),
    )
    return group, grid, sums


def _check_ascending(groups: Sequence[Sequence[int]]) -> None:
    """Raise DeviceCountError unless the ranks of each tensor group ascend, as torch numbers them in their group."""
    odd = next((ranks for ranks in groups if sorted(ranks) != list(ranks)), None)
    if odd is not None:
        raise DeviceCountError(
            f"the global ranks along the mesh dimension of the axis 'tensor' must ascend, because torch numbers the "
            f"ranks of a process group in this order; this mesh has {odd}; use init_device_mesh(), or reorder the mesh"
        )


def _own_device(mesh: DeviceMesh) -> torch.device:
    """Return the device of this process's rank of the mesh."""
    return current_device(mesh.device_type)


def dims_of(mesh: DeviceMesh, axes: Axes | None) -> dict[str, int]:
    """Map each axis of the mesh ("pipeline", "replicate", "shard" or "tensor") to the index of its dimension."""
    names = mesh.mesh_dim_names or ()
    if axes is None and mesh.ndim == 1:
        return {"pipeline": 0}
    if axes is None:
        axes = {axis: name for axis, known in _KNOWN.items() for name in names if name in known}
        if "pipeline" not in axes or len(axes) < mesh.ndim:
            raise DeviceCountError(
                f"a pipeline needs one mesh dimension for its ranks, and may use other dimensions for replicas and "
                f"split layers; this mesh has "
                f"{f'the dimensions {names}' if names else f'{mesh.ndim} unnamed dimensions'}; pass one dimension of "
                f"the mesh, such as mesh['pp'], or name the axes: axes={{'pipeline': 'pp', 'replicate': 'dp'}}"
            )
    if not isinstance(axes, Mapping) or "pipeline" not in axes or not set(axes) <= set(_KNOWN):
        raise DeviceCountError(
            f"axes= must map 'pipeline', and 'replicate' or 'shard' if there are replicas, and 'tensor' if layers are "
            f"split over ranks, to names of mesh dimensions; got {shown(axes)}; for example, pass "
            f"axes={{'pipeline': 'pp', 'replicate': 'dp'}}"
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
