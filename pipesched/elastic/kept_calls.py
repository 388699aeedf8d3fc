"""Kept calls: the calls of ``step`` that may have to run again after a loss, and the division of their batches.

If the number of replicas changes, the batches are divided anew: each replica gets micro-batches of the old replicas, in
their order over all replicas, so that the same micro-batches are added up.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pipesched.runtime.microbatches import GivenBatch, Microbatch, Splitter
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.output_metrics import Metrics
from pipesched.tensors.payload import pytree

__all__ = ["KEPT_BATCHES", "KeptCall", "batches_of_first", "divided_anew", "of_replica"]

KEPT_BATCHES = "kept batches"  # the kind of exchange that gives rank 1 a copy of the batch that only rank 0 passes
_NO_BATCH = GivenBatch((), {})

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
    #: The replica of the process that made the call, and the number of replicas.
    replica: int
    num_replicas: int

    def copied(self) -> "KeptCall":
        """Return a copy, because the caller may change its batch once a step has returned."""
        return self._replace(given=_given(pytree.tree_map_only(Tensor, _clone, _plain(self.given))))

    def in_microbatches(self, num_replicas: int = 1) -> list[_Parts]:
        """Return the micro-batches. ``num_replicas`` is the number of replicas whose batches were passed as one."""
        args, kwargs, target, microbatches = self.given
        if microbatches is None:
            batch = self.splitter.batch(args, kwargs, target, num_replicas=num_replicas)
        else:
            batch = self.splitter.as_given(microbatches, num_replicas=num_replicas)
        targets = batch.targets or [None] * len(batch.inputs)
        return [(*inputs, target) for inputs, target in zip(batch.inputs, targets, strict=True)]

    def over(self, microbatches: Sequence[_Parts], replica: int, num_replicas: int) -> "KeptCall":
        """Return the same call for the micro-batches of another replica."""
        given = _given((*_NO_BATCH[:3], microbatches))
        return self._replace(given=given, replica=replica, num_replicas=num_replicas)

    def sent(self) -> Any:
        """Return the batch in a form that can be sent."""
        return _plain(self.given)

    def with_sent(self, arrived: Any) -> "KeptCall":
        """Return the same call with a batch that another rank has sent."""
        return self._replace(given=_given(arrived))


def _plain(given: GivenBatch) -> tuple[Any, ...]:
    """Return a batch as tuples, lists and dicts."""
    parts = given.microbatches
    if parts is None:
        return (*given[:3], None)
    return (*given[:3], [(one.args, one.kwargs, one.target) for one in parts])


def _given(plain: tuple[Any, ...]) -> GivenBatch:
    args, kwargs, target, parts = plain
    if parts is not None:
        parts = [Microbatch(*own, target=its_target, **its_kwargs) for own, its_kwargs, its_target in parts]
    return GivenBatch(tuple(args), kwargs, target, parts)


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


def batches_of_first(host: RankHost, calls: Mapping[int, KeptCall], steps: Iterable[int]) -> dict[int, Any]:
    """Return, for each step, the batch that this process passes if only rank 0 passes batches. Collective.

    That is the batch on rank 0, and no batch on the other ranks. None if no rank that lives has the batch.

    Args:
        host: the ranks that go on.
        calls: the calls of this process, keyed by step.
        steps: the steps.

    """
    grid = host.grid
    own = {
        step: call.sent()
        if call.num_replicas == len(grid.rows)
        else (*_NO_BATCH[:3], call.in_microbatches(call.num_replicas))
        for step, call in calls.items()
        if call.given.is_given
    }
    held = {step: plain for known in reversed(host.collectives.gathered_in_all(own)) for step, plain in known.items()}
    batches: dict[int, Any] = dict.fromkeys(steps)
    for step in batches.keys() & held.keys():
        batches[step] = _NO_BATCH if grid.rank else _given(held[step])
    return batches


def of_replica(host: RankHost, parts: Sequence[_Parts] | None) -> list[_Parts] | None:
    """Return the micro-batches that the first rank of this process's replica passes. Collective.

    Args:
        host: the ranks.
        parts: the micro-batches of this process; None if it has none. Returns None if no rank of the replica has any.

    """
    every = host.collectives.gathered_in_all((host.grid.replica, parts))
    own = (given for replica, given in every if replica == host.grid.replica and given is not None)
    return next(own, None)
