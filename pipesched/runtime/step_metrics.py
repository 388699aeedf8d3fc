"""Step metrics: the loss of a step with the losses that layers added, and the named scalars beside it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.errors import ExecutionError
from pipesched.runtime.microbatches import Weighting
from pipesched.runtime.rank_host import MeshRanks, RankHost
from pipesched.runtime.stage.step_data import Added, StepData
from pipesched.tensors.payload import used_here
from pipesched.tensors.pending_tensor import pending

__all__ = ["StepMetrics", "with_added"]

#: A loss that a layer added: micro-batch, place of the call, name, value.
_Row = tuple[int, str, int, int, str, Tensor]


class _Result(NamedTuple):
    loss: Tensor
    metrics: dict[str, Tensor]


class StepMetrics:
    """The loss of the last step or evaluation, and its named scalars."""

    def __init__(self) -> None:
        #: Whether layers add losses, by the kind of the call; agreed in the first call of each kind.
        self._adds: dict[Hashable, bool] = {}
        #: Reads the named scalars.
        self.read: Callable[[], Mapping[str, Tensor]] = dict

    @property
    def last(self) -> dict[str, Tensor]:
        """The named scalars of the last call. Under a mesh, reading them waits for them."""
        return dict(self.read())

    def finish(
        self,
        host: RankHost,
        rank: int,
        loss: Callable[[], Tensor],
        step_data: StepData,
        weighting: Weighting,
        kind: Hashable,
        microbatches: Sequence[int],
    ) -> Tensor:
        """Return the loss of a call in all processes. Collective.

        Args:
            host: the host of the ranks.
            rank: the rank that computes the loss.
            loss: makes the loss there, without the losses that layers added.
            step_data: the results of this process's stages.
            weighting: how the losses of micro-batches are weighted.
            kind: equal for calls in which layers either all may add losses, or all add none.
            microbatches: the numbers of the call's micro-batches in the step data.

        """
        self.read = dict
        if isinstance(host, MeshRanks):
            return self._finish_mesh(host, rank, loss, step_data, weighting, kind, microbatches)
        if not step_data.added:
            return loss()
        result = _combined(loss(), _rows(step_data, microbatches), weighting)
        self.read = lambda: result.metrics
        return result.loss

    def _finish_mesh(
        self,
        host: MeshRanks,
        rank: int,
        loss: Callable[[], Tensor],
        step_data: StepData,
        weighting: Weighting,
        kind: Hashable,
        microbatches: Sequence[int],
    ) -> Tensor:
        rows = _rows(step_data, microbatches)
        if kind not in self._adds:
            self._adds[kind] = any(host.executor.exchange(bool(rows)))
        if not self._adds[kind]:
            self._check_none(host, rows)
            return host.loss(rank, loss)
        shared = host.shared((loss() if host.holds(rank) else None, rows))
        here = host.devices[rank]
        found: list[_Result] = []

        def result() -> _Result:
            if not found:
                parts: list[Any] = shared()
                every = [row for _, own in parts for row in own]
                found.append(_combined(parts[rank][0].to(here), every, weighting))
            return found[0]

        self.read = lambda: result().metrics
        return pending(lambda: result().loss)

    def _check_none(self, host: MeshRanks, rows: Sequence[_Row]) -> None:
        """Stop all ranks if a layer adds a loss of which the other ranks do not know."""
        if rows:
            _, layer, *_, name, _ = rows[0]
            error = ExecutionError(
                f"over a mesh, layers must add losses from the first step on, so that all ranks know of them; layer "
                f"{layer!r} on rank {host.rank} added its first loss {name!r} in a later step; add zero in the steps "
                f"before, as with add_loss(0 * x.sum())"
            )
            host.fail("step", error)


def with_added(loss: Tensor, added: Mapping[int, Added], weighting: Weighting) -> Tensor:
    """The loss of a mini-batch with the losses that layers added."""
    rows = _rows_of(added, range(len(weighting.shares)))
    return _combined(loss, rows, weighting).loss if rows else loss


def _rows(step_data: StepData, microbatches: Sequence[int]) -> list[_Row]:
    """The losses that layers added, by micro-batch from 0; they are removed from the step data."""
    if not step_data.added:
        return []
    return _rows_of({number: step_data.added.pop(number, {}) for number in microbatches}, microbatches)


def _rows_of(added: Mapping[int, Added], microbatches: Sequence[int]) -> list[_Row]:
    return [
        (number, *place, name, used_here(value))
        for number, microbatch in enumerate(microbatches)
        for place, (name, value) in added.get(microbatch, {}).items()
    ]


def _combined(loss: Tensor, rows: Sequence[_Row], weighting: Weighting) -> _Result:
    """Add up losses in an order that does not depend on the plan: by name, micro-batch and place."""
    named: dict[str, list[Tensor]] = {}
    for number, *_, name, value in sorted(rows, key=lambda row: row[:4]):
        share = weighting.shares[number]
        here = value.to(loss.device)
        named.setdefault(name, []).append(here if share is None else here * share)
    metrics = {name: torch.stack(named[name]).sum() for name in sorted(named)}
    for value in metrics.values():
        loss = loss + value
    return _Result(loss, metrics)
