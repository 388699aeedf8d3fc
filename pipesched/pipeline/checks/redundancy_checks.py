"""Redundancy checks: raise an error if a pipeline cannot keep copies of its ranks' states."""

from collections.abc import Iterator

from torch import distributed, nn

from pipesched.errors import InputError
from pipesched.pipeline.assembly import AssemblySpec
from pipesched.runtime.rank_grid import RankGrid

__all__ = ["check_redundancy"]


def check_redundancy(spec: AssemblySpec, grid: RankGrid, *, streams: bool, is_told: bool) -> None:
    """Raise InputError if the pipeline cannot keep copies of its ranks' states.

    Args:
        spec: the model and the user's options for its stages.
        grid: the ranks.
        streams: whether the schedule's steps overlap.
        is_told: whether the user's code is told of a recovery: by ``on_recovery=``, or because it recovers itself.

    """
    reason, remedy = next(_obstacles(spec, grid, streams=streams, is_told=is_told), ("", ""))
    if reason:
        raise InputError(
            f"redundancy= lets the ranks of a mesh go on after the loss of a rank, from copies of their states; "
            f"{reason}; {remedy}, or leave redundancy= out"
        )


def _obstacles(
    spec: AssemblySpec, grid: RankGrid, *, streams: bool, is_told: bool
) -> Iterator[tuple[str, str]]:
    """Yield the reasons why states cannot be copied, each with its remedy."""
    if grid.in_one_process:
        yield "this pipeline runs in one process, whose loss is the loss of all ranks", "pass mesh="
    elif grid.num_processes < 2:
        yield "this mesh has only one rank", "pass a mesh of several ranks"
    elif distributed.get_world_size() != grid.num_processes:
        yield (
            f"torch's default process group is made anew then, and it has {distributed.get_world_size()} ranks, but "
            f"the mesh of this pipeline has {grid.num_processes}",
            "pass a mesh of all ranks",
        )
    if spec.optimizer is None:
        yield "the copy of a state runs the updates of the optimizer again, and there is no optimizer=", "pass it"
    if streams:
        yield "the steps of an asynchronous schedule overlap, so ranks have no common version", "choose another one"
    if spec.wrap is not None:
        yield "wrap= has changed each stage as a whole, so its layers cannot move", "leave wrap= out"
    if spec.zero or grid.num_shards > 1:
        yield "replicas that divide states are no copies of each other", "pass zero=0 and axes= without 'shard'"
    if len(grid.rows) > 1 and not is_told:
        yield "a loss changes the replicas, so your data loader must divide its batches anew", "pass on_recovery="
    if len(grid.rows) > 1 and len(grid.pipeline) == 1:
        yield "each replica has only one rank, so its batch is lost with the rank", "use pipelines of several ranks"
    if any(device.type != "cpu" for device in grid.all_devices):
        yield "the copies are updated on the host, with other rounding than on a device", "train on CPUs"
    if grid.inputs == "first":
        yield "with inputs='first', only one rank has the batch", "pass inputs='all'"
    for root in (spec.model, spec.loss_fn):
        for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"module {name!r} has get_extra_state, which a step may change", "keep such state in buffers"
