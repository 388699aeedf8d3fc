"""Divided weights: between runs, each replica holds only its rows of a stage's weights.

An UNSHARD starts to gather the full (undivided) weights. The first action that uses the weights waits for the gather,
and a RESHARD frees the weights. The optimizer updates only this replica's rows. Replicas send nothing after an
update, because the next run gathers the updated rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.runtime.gradients.buckets import StartedSum
from pipesched.runtime.gradients.shards import Shards
from pipesched.runtime.stage.sharded_update import ShardedUpdate, Spread

__all__ = ["DividedWeights"]

#: Sends tensors to the other replicas; returns the tensors of all replicas, in replica order.
_Exchange = Callable[[list[Tensor]], list[list[Tensor]]]


class DividedWeights:
    """The weights of one stage, divided by rows. Between runs, each replica holds only its own rows.

    A divided parameter stays the same object, but its ``data`` changes. Between ``wait`` and ``reshard``, its ``data``
    is the whole tensor. At all other times, its ``data`` contains only this replica's rows, if any. Three kinds of
    parameters are never divided: parameters that are trained without the pipeline's optimizer, because their gradients
    are not divided; parameters that are not contiguous; and parameters that are in none of the ``units``.

    Args:
        units: groups of parameters that are gathered together, in the order in which the stage uses the groups.
        shards: the rows of each replica.
        update: updates this replica's rows; None if the stage has no optimizer.
        spread: sends rows to all replicas.

    """

    def __init__(
        self,
        units: Iterable[Sequence[nn.Parameter]],
        shards: Shards,
        update: ShardedUpdate | None,
        spread: Spread,
    ) -> None:
        self._units = [list(unit) for unit in units]
        self._shards = shards
        self._update = update
        self._updated = {*(() if update is None else update.parameters)}
        self._spread = spread
        self._divided: set[nn.Parameter] = set()
        #: The whole tensors of this run. Between two gathers of a run, the storages of these tensors are empty.
        self._whole: dict[nn.Parameter, Tensor] = {}
        self._arriving = False  # whether the whole tensors are being gathered
        self._gathered = False  # whether the parameters are whole
        self._number = 0
        self._ticket: StartedSum | None = None
        #: The start and the end of each gather of this run, on the clock of the rank's executor.
        self.spans: dict[int, tuple[Any, Any]] = {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._divided

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Iterate over the divided parameters."""
        return (parameter for parameter in chain(*self._units) if parameter in self._divided)

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of a parameter's whole tensor."""
        return self._shards.shape(parameter)

    def own_rows(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return this replica's rows as (first, last + 1); None if the parameter is not cut."""
        return self._shards.own_rows(parameter)

    def end_division(self) -> None:
        """Give each divided parameter a whole tensor without contents, for the stages of the next plan."""
        for parameter in list(self):
            parameter.data = self._allocated(parameter)
        self._divided.clear()

    @torch.no_grad()
    def divide(self) -> None:
        """Keep only this replica's rows of the parameters that are not divided yet."""
        for parameter in chain(*self._units):
            if parameter not in self._divided and parameter.is_contiguous() and not self._stays_whole(parameter):
                self._divided.add(parameter)
                self._cut(parameter)
        self._follow(self._updated)  # includes whole parameters, whose memory a cast may have replaced

    def _cut(self, parameter: nn.Parameter) -> None:
        """Replace the whole tensor with this replica's rows."""
        rows = self._shards.own(parameter, parameter.detach())
        none = (0, *self._shards.shape(parameter)[1:])
        parameter.data = parameter.detach().new_empty(none) if rows is None else rows.clone()
        self._follow([parameter])

    def _follow(self, parameters: Iterable[nn.Parameter]) -> None:
        if self._update is not None:
            self._update.follow(parameters)

    def _stays_whole(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and parameter not in self._updated

    def begin(self) -> None:
        """Start a run: keep only this replica's rows."""
        self.spans.clear()
        with torch.inference_mode(False):
            self.divide()

    @torch.no_grad()
    def unshard(self, number: int) -> None:
        """UNSHARD: begin gathering the full weights. ``number`` is this gather's number in the run."""
        parts = []
        with torch.inference_mode(False):  # weights are ordinary tensors in any run
            for unit in self._units:
                by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
                for parameter in unit:
                    if parameter in self._divided:
                        empty: list[list[Tensor]] = [[] for _ in range(self._shards.num_replicas)]
                        lists = by_dtype.setdefault(parameter.dtype, empty)
                        for own, rows in zip(lists, self._begun(parameter), strict=True):
                            own.extend([] if rows is None else [rows])
                parts += [lists for lists in by_dtype.values() if any(lists)]
            self._arriving = True
            self._number = number
            if parts:
                self._ticket = self._spread.spread(parts)

    def _begun(self, parameter: nn.Parameter) -> list[Tensor | None]:
        """Allocate the whole tensor of a parameter, and copy this replica's rows into it.

        Returns a view of each replica's rows. The first gather of a run creates the tensor, and later gathers fill the
        same tensor, because the autograd graphs of micro-batches in flight hold views of this tensor.
        """
        whole = self._whole.get(parameter)
        if whole is None:
            whole = self._whole[parameter] = self._allocated(parameter)
        else:
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        own = self._shards.own(parameter, whole)
        if own is not None:
            own.copy_(parameter.detach())
        return self._shards.parts(parameter, whole)

    def _allocated(self, parameter: nn.Parameter) -> Tensor:
        return torch.empty(self._shards.shape(parameter), dtype=parameter.dtype, device=parameter.device)

    def wait(self) -> None:
        """Wait for the full weights, and assign them to the parameters. Does nothing if no gather is in progress."""
        if not self._arriving:
            return
        self._wait()
        self._arriving = False
        self._gathered = True
        for parameter, whole in self._whole.items():
            parameter.data = whole
        self._follow(self._whole)  # releases the memory of the separate rows

    def _wait(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.wait(self._spread.check)
            if ticket.span is not None:
                self.spans[self._number] = ticket.span

    @torch.no_grad()
    def reshard(self, *, last: bool) -> None:
        """RESHARD: free the full weights, and keep this replica's rows.

        ``last`` states whether this is the last RESHARD in the run. If so, the memory is freed once no other tensor
        uses it. Otherwise the memory is freed immediately, even though the graphs of micro-batches in flight refer to
        it.
        """
        with torch.inference_mode(False):
            self.wait()
            self._gathered = False
            for parameter in [*self._whole]:  # one by one: frees each whole tensor before the next rows are copied
                if self._stays_whole(parameter):  # divided while frozen, trainable since then
                    self._divided.discard(parameter)
                    del self._whole[parameter]
                    continue
                self._cut(parameter)
                if last:
                    del self._whole[parameter]
                else:
                    self._whole[parameter].untyped_storage().resize_(0)

    def end(self) -> None:
        """End a run: keep only this replica's rows, even if the run has failed."""
        self._ticket = None
        self._arriving = False
        if self._gathered:
            self.reshard(last=True)
        self._whole = {}

    @torch.no_grad()
    def assemble(self, exchange: _Exchange) -> None:
        """Gather the full weights, and keep them until ``divide`` or the next run. Collective over the replicas."""
        self.divide()  # the parameters may already be whole in some replicas
        for unit in self._units:
            own = [parameter for parameter in unit if parameter in self._divided]
            every = exchange([parameter.detach() for parameter in own]) if own else []
            for parameter, *pieces in zip(own, *every, strict=True):
                whole = self._allocated(parameter)
                for place, rows in zip(self._shards.parts(parameter, whole), pieces, strict=True):
                    if place is not None:
                        place.copy_(rows)
                parameter.data = whole
                self._divided.discard(parameter)
