"""Kept calls: the calls of ``step`` that may have to run again after a loss, and the division of their batches.

If the number of replicas changes, the batches are divided anew: each replica gets micro-batches of the old replicas, in
their order over all replicas, so that the same micro-batches are added up.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.runtime.microbatches import GivenBatch, Microbatch, Splitter
from pipesched.runtime.rank_host import RankHost
from pipesched.tensors.payload import pytree

__all__ = ["KeptCall", "divided_anew", "in_microbatches", "of_replica"]

#: The inputs (args, kwargs) and the target of a micro-batch.
_Parts = tuple[tuple[Any, ...], dict[str, Any], Any]


class KeptCall(NamedTuple):
    """A call of ``step`` that may have to run again."""

    given: GivenBatch
    #: The other arguments.
    options: Mapping[str, Any]

    def copied(self) -> "KeptCall":
        """Return a copy, because the caller may change its batch once a step has returned."""
        return self._replace(given=pytree.tree_map_only(Tensor, _clone, self.given))

    def over(self, microbatches: Sequence[_Parts]) -> "KeptCall":
        """Return the same call for other micro-batches."""
        parts = [Microbatch(*args, target=target, **kwargs) for args, kwargs, target in microbatches]
        return self._replace(given=GivenBatch((), {}, None, parts))


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def in_microbatches(call: KeptCall, splitter: Splitter) -> list[_Parts]:
    """Return the micro-batches of a call."""
    args, kwargs, target, microbatches = call.given
    with torch.no_grad():
        batch = splitter.batch(args, kwargs, target) if microbatches is None else splitter.as_given(microbatches)
    targets = batch.targets or [None] * len(batch.inputs)
    return [(*inputs, target) for inputs, target in zip(batch.inputs, targets, strict=True)]


def divided_anew(
    host: RankHost, calls: Mapping[int, Sequence[_Parts]], *, old: int, num_replicas: int
) -> dict[int, list[_Parts]]:
    """Exchange batches, and return the micro-batches of this process's new replica for each step. Collective.

    A step is left out if no rank that lives has the batch of one of the old replicas.

    Args:
        host: the ranks that go on.
        calls: the micro-batches of this process's old replica, keyed by step.
        old: the index of the old replica of this process.
        num_replicas: the number of old replicas.

    """
    grid, gather = host.grid, host.collectives.gathered_in_all
    first: dict[tuple[int, int], int] = {}
    for process, (replica, steps) in enumerate(gather((old, sorted(calls)))):
        for step in steps:
            first.setdefault((replica, step), process)
    own = {step: list(parts) for step, parts in calls.items() if first[old, step] == grid.rank}
    batches = {
        (replica, step): parts for replica, given in gather((old, own)) for step, parts in given.items()
    }
    divided: dict[int, list[_Parts]] = {}
    for step in sorted({step for _, step in first}):
        whole = [batches[replica, step] for replica in range(num_replicas) if (replica, step) in batches]
        if len(whole) == num_replicas:
            parts = [part for own_parts in whole for part in own_parts]
            size = len(parts) // len(grid.rows)
            divided[step] = parts[size * grid.replica : size * (grid.replica + 1)]
    return divided


def of_replica(host: RankHost, parts: Sequence[_Parts] | None) -> list[_Parts] | None:
    """Return the micro-batches that the first rank of this process's replica passes. Collective.

    Args:
        host: the ranks.
        parts: the micro-batches of this process; None if it has none. Returns None if no rank of the replica has any.

    """
    every = host.collectives.gathered_in_all((host.grid.replica, parts))
    own = (given for replica, given in every if replica == host.grid.replica and given is not None)
    return next(own, None)
