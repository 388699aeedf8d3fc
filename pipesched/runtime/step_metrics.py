"""Step metrics: the loss of a step, including the losses that layers added, and the step's named scalars."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipesched.devices.streams import used_here
from pipesched.errors import ExecutionError, InputError
from pipesched.runtime.collectives import LossAndMetrics, RankCollectives
from pipesched.runtime.microbatches import Weighting
from pipesched.runtime.rank_host import RankHost
from pipesched.runtime.stage.step_data import Added, StepData
from pipesched.tensors.added_losses import AddedReduction
from pipesched.tensors.loss_factors import scaled
from pipesched.tensors.pending_tensor import pending

__all__ = ["RunResults", "StepMetrics", "with_added"]

#: A loss that a layer added: micro-batch, place of the call, name, reduction, value.
_Row = tuple[int, str, int, int, str, AddedReduction, Tensor]


class _LossAndMetrics(NamedTuple):
    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """The results of one run in this process."""

    #: The rank that computes the loss.
    rank: int
    #: Computes the loss on that rank, excluding the losses that layers added.
    loss: Callable[[], Tensor]
    step_data: StepData
    #: The numbers of the run's micro-batches in the step data.
    microbatches: Sequence[int]
    weighting: Weighting
    #: The kind of the run. Layers add losses either in all runs of a kind or in none.
    kind: Hashable
    #: Whether the caller asked for metrics.
    measures: bool = False


class StepMetrics:
    """Computes the loss of each step or evaluation, and keeps the named scalars of the latest step or evaluation."""

    def __init__(self) -> None:
        #: Whether layers add losses, keyed by the kind of run. All processes agree in the first run of a kind.
        self._adds: dict[Hashable, bool] = {}
        self._agreed: RankCollectives | None = None  # over which they have agreed
        #: Reads the named scalars of the latest step or evaluation.
        self.read: Callable[[], Mapping[str, Tensor]] = dict

    @property
    def last(self) -> dict[str, Tensor]:
        """The named scalars of the last step or evaluation.

        With a mesh, reading this property waits until the scalars have arrived from the rank that computed them.
        """
        return dict(self.read())

    def finish(self, host: RankHost, run: RunResults) -> Tensor:
        """Return the loss of a run in all processes. Collective."""
        self.read = dict
        rows = _rows(run.step_data, run.microbatches)
        if not host.grid.in_one_process:
            return self._finish_mesh(host, run, rows)
        result = _combined(run.loss(), _measured(run), rows, run.weighting)
        self.read = lambda: result.metrics
        return result.loss

    def _finish_mesh(self, host: RankHost, run: RunResults, rows: Sequence[_Row]) -> Tensor:
        if self._agreed is not host.collectives:
            self._agreed, self._adds = host.collectives, {}  # other processes may have joined
        if run.kind not in self._adds:
            self._adds[run.kind] = any(host.collectives.gathered_in_all(bool(rows)))
        adds = self._adds[run.kind]
        if not adds:
            self._check_none(host, rows)
            if not run.measures:
                return host.collectives.loss(run.rank, run.loss)
        own = self._of_rank(host, run)
        collectives = host.collectives
        shared = collectives.shared((own, rows)) if adds else collectives.loss_with_metrics(run.rank, own)
        rank, here, weighting, measures = run.rank, host.grid.devices[run.rank], run.weighting, run.measures
        sum_of_replicas = collectives.sum_of_replicas
        size = len(run.microbatches)
        found: list[_LossAndMetrics] = []

        def result() -> _LossAndMetrics:  # must not reference ``run``, because ``run`` would keep the batch alive
            if not found:
                parts: Any = shared()
                loss, metrics = sum_of_replicas([ranks[rank][0] for ranks in parts], here) if adds else parts
                if measures and metrics is None:
                    raise ExecutionError(
                        f"if any rank passes metrics=, all ranks must pass it; another rank passed metrics=, but "
                        f"rank {rank}, which has the outputs, did not; pass the same arguments on every rank"
                    )
                every = [
                    (replica * size + number, *row)
                    for replica, ranks in enumerate(parts if adds else ())
                    for _, own in ranks
                    for number, *row in own
                ]
                found.append(_combined(loss.to(here), metrics or {}, every, weighting))
            return found[0]

        self.read = lambda: result().metrics
        return pending(lambda: result().loss)

    def _of_rank(self, host: RankHost, run: RunResults) -> LossAndMetrics | None:
        """Return the loss and the metrics of this process; None if another rank computes them."""
        if not host.grid.holds(run.rank):
            return None
        try:
            return run.loss(), _measured(run) if run.measures else None
        except InputError as error:  # the other ranks wait for the result
            host.collectives.fail("metrics", error)

    def _check_none(self, host: RankHost, rows: Sequence[_Row]) -> None:
        """Stop all ranks if a layer adds a loss that the other ranks do not expect."""
        if rows:
            _, layer, *_, name, _, _ = rows[0]
            error = ExecutionError(
                f"with a mesh, layers must add losses from the first step on, so that all ranks expect them; layer "
                f"{layer!r} on rank {host.grid.position} added its first loss {name!r} in a later step; in earlier "
                f"steps, add a loss of zero, for example add_loss(0 * x.sum())"
            )
            host.collectives.fail("step", error)


def with_added(loss: Tensor, added: Mapping[int, Added], weighting: Weighting) -> Tensor:
    """Return the loss of a mini-batch, including the losses that layers added."""
    rows = _rows_of(added, range(len(weighting.shares)))
    return _combined(loss, {}, rows, weighting).loss


def _rows(step_data: StepData, microbatches: Sequence[int]) -> list[_Row]:
    """Remove the added losses from the step data, and return them with micro-batches numbered from 0."""
    if not step_data.added:
        return []
    return _rows_of({number: step_data.added.pop(number, {}) for number in microbatches}, microbatches)


def _rows_of(added: Mapping[int, Added], microbatches: Sequence[int]) -> list[_Row]:
    return [
        (number, *place, name, reduction, used_here(value))
        for number, microbatch in enumerate(microbatches)
        for place, (name, reduction, value) in added.get(microbatch, {}).items()
    ]


def _measured(run: RunResults) -> dict[str, Tensor]:
    """Return the metrics of the mini-batch, combined from the micro-batches' metrics with the weights of the losses."""
    of_each = [run.step_data.measured.pop(number, {}) for number in run.microbatches]
    if any(one.keys() != of_each[0].keys() for one in of_each):
        odd = next(number for number, one in enumerate(of_each) if one.keys() != of_each[0].keys())
        raise InputError(
            f"metrics(outputs, target) must return the same names for every micro-batch; it returned "
            f"{sorted(of_each[0])} for micro-batch 0 and {sorted(of_each[odd])} for micro-batch {odd}; return the same "
            "names for all micro-batches"
        )
    weighted = run.weighting.weighted
    return {name: run.weighting.total(weighted([used_here(one[name]) for one in of_each])) for name in of_each[0]}


def _combined(
    loss: Tensor, metrics: Mapping[str, Tensor], rows: Sequence[_Row], weighting: Weighting
) -> _LossAndMetrics:
    """Return the sum of ``loss`` and all added losses, and the metrics, which include the added losses of each name.

    Losses are added in an order that does not depend on the plan: by micro-batch, then by the place of the call.
    """
    named: dict[str, list[Tensor]] = {}
    for number, *_, name, reduction, value in sorted(rows, key=lambda row: row[:4]):
        # numbers continue across replicas
        share = None if reduction == "sum" else weighting.shares[number % len(weighting.shares)]
        here = value.to(loss.device)
        named.setdefault(name, []).append(scaled(here, share))
    if twice := named.keys() & metrics.keys():
        raise InputError(
            f"a metric must not have the name of an added loss; a layer adds a loss named {min(twice)!r}, and metrics= "
            f"also returns that name; rename the metric or the loss"
        )
    added = {name: torch.stack(named[name]).sum() for name in sorted(named)}
    for value in added.values():
        loss = loss + value
    return _LossAndMetrics(loss, {**added, **metrics})
