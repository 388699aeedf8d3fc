"""Kept calls: the calls of ``step`` that may have to run again after a loss, and the division of their batches.

If the number of replicas changes, the batches are divided anew: each replica gets micro-batches of the old replicas, in
their order over all replicas, so that the same micro-batches are added up.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pipesched.runtime.microbatches import GivenBatch, Microbatch, Splitter
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.tensors.payload import pytree

__all__ = ["KeptCall", "divided_anew", "of_replica"]

#: The inputs (args, kwargs) and the target of a micro-batch.
_Parts = tuple[tuple[Any, ...], dict[str, Any], Any]


class KeptCall(NamedTuple):
    """A call of ``step`` that may have to run again."""

    given: GivenBatch
    metrics: Metrics | None
    #: The other arguments.
    wanted: Mapping[str, bool]
    #: Divides the batch.
    splitter: Splitter
    #: The replica whose batch this is, and the number of replicas.
    replica: int
    num_replicas: int

    def copied(self) -> "KeptCall":
        """Return a copy, because the caller may change its batch once a step has returned."""
        return self._replace(given=pytree.tree_map_only(Tensor, _clone, self.given))

    def in_microbatches(self) -> list[_Parts]:
        """Return the micro-batches."""
        args, kwargs, target, microbatches = self.given
        split = self.splitter
        batch = split.batch(args, kwargs, target) if microbatches is None else split.as_given(microbatches)
        targets = batch.targets or [None] * len(batch.inputs)
        return [(*inputs, target) for inputs, target in zip(batch.inputs, targets, strict=True)]

    def over(self, microbatches: Sequence[_Parts], replica: int, num_replicas: int) -> "KeptCall":
        """Return the same call for the micro-batches of another replica."""
        parts = [Microbatch(*args, target=target, **kwargs) for args, kwargs, target in microbatches]
        return self._replace(given=GivenBatch((), {}, None, parts), replica=replica, num_replicas=num_replicas)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def divided_anew(host: RankHost, calls: Mapping[int, KeptCall]) -> dict[int, list[_Parts]]:
    """Exchange batches, and return the micro-batches of this process's new replica for each step. Collective.

    A step is left out if no rank that lives has the batch of one of the old replicas.

    Args:
        host: the ranks that go on.
        calls: the calls of this process, keyed by step.

    """
    grid, gather = host.grid, host.collectives.gathered_in_all
    first: dict[tuple[int, int, int], int] = {}
    for process, known in enumerate(gather([(step, call.num_replicas, call.replica) for step, call in calls.items()])):
        for place in known:
            first.setdefault(tuple(place), process)
    own = [
        (step, call.num_replicas, call.replica, call.in_microbatches())
        for step, call in calls.items()
        if first[step, call.num_replicas, call.replica] == grid.rank
    ]
    found: dict[tuple[int, int], dict[int, list[_Parts]]] = {}
    for given in gather(own):
        for step, num_replicas, replica, parts in given:
            found.setdefault((step, num_replicas), {})[replica] = parts
    divided: dict[int, list[_Parts]] = {}
    for (step, num_replicas), by_replica in found.items():  # an attempt to recover may have divided some calls already
        if len(by_replica) == num_replicas:
            every = [part for replica in sorted(by_replica) for part in by_replica[replica]]
            size = len(every) // len(grid.rows)
            divided[step] = every[size * grid.replica : size * (grid.replica + 1)]
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
