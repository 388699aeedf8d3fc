"""Process groups: torch's groups of processes, made by all processes of a job together."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import finalize

from torch import distributed

from pipesched.errors import ExecutionError

__all__ = ["own_group", "release_with"]


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


def release_with(owner: object, group: Any) -> None:
    """Destroy a process group when its owner is freed."""
    finalize(owner, _release, group).atexit = False


def _release(group: Any) -> None:
    if distributed.is_initialized():
        with suppress(RuntimeError, ValueError):  # the job may have made all groups anew
            distributed.destroy_process_group(group)
