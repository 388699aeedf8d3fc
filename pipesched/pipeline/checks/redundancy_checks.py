"""Redundancy checks: raise an error if a pipeline cannot keep copies of its ranks' states."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import distributed, nn

from pipesched.errors import InputError
from pipesched.runtime.rank_grid import RankGrid

__all__ = ["Obstacle", "check_redundancy"]


class Obstacle(NamedTuple):
    """A reason for which states cannot be copied."""

    #: Whether the pipeline has this obstacle.
    exists: bool
    reason: str
    remedy: str


def check_redundancy(grid: RankGrid, roots: Iterable[object], obstacles: Sequence[Obstacle]) -> None:
    """Raise InputError if the pipeline cannot keep copies of its ranks' states.

    Args:
        grid: the ranks.
        roots: the model and the loss function.
        obstacles: other reasons for which states cannot be copied.

    """
    found = next((one for one in (*_of_ranks(grid), *obstacles, _of_modules(roots)) if one.exists), None)
    if found is not None:
        raise InputError(
            f"redundancy= lets the ranks of a mesh go on after the loss of a rank, from copies of their states; "
            f"{found.reason}; {found.remedy}, or leave redundancy= out"
        )


def _of_ranks(grid: RankGrid) -> list[Obstacle]:
    world = 1 if grid.in_one_process else distributed.get_world_size()
    return [
        Obstacle(grid.in_one_process, "this pipeline runs in one process, whose loss is the loss of all", "pass mesh="),
        Obstacle(grid.num_processes < 2, "this mesh has only one rank", "pass a mesh of several ranks"),
        Obstacle(
            world != grid.num_processes,
            f"torch's default process group is made anew after a loss; it has {world} ranks, but the mesh of this "
            f"pipeline has {grid.num_processes}",
            "pass a mesh of all ranks",
        ),
        Obstacle(
            grid.num_shards > 1, "replicas that divide weights are no copies of each other", "pass axes= without shard"
        ),
        Obstacle(
            bool(grid.planes),
            f"each of {len(grid.every_plane)} ranks of a tensor group holds other blocks of the weights, and the "
            f"groups cannot be made anew from the ranks that are left",
            "save checkpoints",
        ),
        Obstacle(
            len(grid.rows) > 1 and len(grid.pipeline) == 1,
            "each replica has only one rank, so its batch is lost with the rank",
            "use pipelines of several ranks",
        ),
        Obstacle(
            any(device.type != "cpu" for device in grid.all_devices),
            "the copies are updated on the host, which rounds differently from a device",
            "train on CPUs",
        ),
        Obstacle(grid.inputs == "first", "with inputs='first' only one rank has the batch", "pass inputs='all'"),
    ]


def _of_modules(roots: Iterable[object]) -> Obstacle:
    modules = (pair for root in roots if isinstance(root, nn.Module) for pair in root.named_modules())
    names = [name for name, module in modules if type(module).get_extra_state is not nn.Module.get_extra_state]
    reason = f"module {names[0]!r} has get_extra_state, whose value a step may change" if names else ""
    return Obstacle(bool(names), reason, "keep such state in buffers")
