"""Divided weights: between runs, each replica holds only its rows of a stage's weights.

A run gathers the whole weights once. The stage's first forward waits for them, and they are freed when the sums of the
stage's gradients are complete. The optimizer updates the rows, so nothing is sent after an update: the next run gathers
the updated rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from pipesched.runtime.gradients.buckets import Ticket
from pipesched.runtime.gradients.shards import Shards
from pipesched.runtime.stage.sharded_update import ShardedUpdate, Spread

__all__ = ["DividedWeights"]

#: Sends tensors to the other replicas; returns those of all replicas, in replica order.
_Exchange = Callable[[list[Tensor]], list[list[Tensor]]]


class DividedWeights:
    """The weights of one stage, divided by rows: between runs, each replica holds only its own rows.

    A divided parameter stays the same object. Its ``data`` is this replica's rows, or an empty tensor if the replica
    has none; from ``wait`` to ``release`` its ``data`` is the whole tensor. Three kinds of parameters are never
    divided: parameters that are trained without the pipeline's optimizer, because their gradients are whole; those
    that are not contiguous; and those in no unit.

    Args:
        units: the parameters, in groups that are gathered together, in the order of their use.
        shards: the rows of each replica.
        update: the update of this replica's rows; None if the stage has no optimizer.
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
        #: The whole tensors that are being gathered.
        self.arriving: dict[nn.Parameter, Tensor] = {}
        self._gathered: list[nn.Parameter] = []  # the divided parameters that are whole for a run
        self._ticket: Ticket | None = None

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._divided

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Iterate over the divided parameters."""
        return (parameter for parameter in chain(*self._units) if parameter in self._divided)

    @torch.no_grad()
    def divide(self) -> None:
        """Keep only this replica's rows of the parameters that are whole."""
        for parameter in chain(*self._units):
            if parameter not in self._divided and parameter.is_contiguous() and not self._stays_whole(parameter):
                self._divided.add(parameter)
                self._cut(parameter)
        self._follow()

    def _cut(self, parameter: nn.Parameter) -> None:
        """Replace the whole tensor by this replica's rows."""
        rows = self._shards.own(parameter, parameter.detach())
        none = (0, *self._shards.shape(parameter)[1:])
        parameter.data = parameter.detach().new_empty(none) if rows is None else rows.clone()

    def _follow(self) -> None:
        if self._update is not None:
            self._update.follow()

    def _stays_whole(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad and parameter not in self._updated

    @torch.no_grad()
    def gather(self) -> None:
        """Start a run: begin to gather the whole weights."""
        parts = []
        with torch.inference_mode(False):  # weights are ordinary tensors in any run
            self.divide()
            for unit in self._units:
                by_dtype: dict[torch.dtype, list[list[Tensor]]] = {}
                for parameter in unit:
                    if parameter in self._divided:
                        empty: list[list[Tensor]] = [[] for _ in range(self._shards.num_replicas)]
                        lists = by_dtype.setdefault(parameter.dtype, empty)
                        for own, rows in zip(lists, self._begun(parameter), strict=True):
                            own.extend([] if rows is None else [rows])
                parts += [lists for lists in by_dtype.values() if any(lists)]
            if parts:
                self._ticket = self._spread.spread(parts)

    def _begun(self, parameter: nn.Parameter) -> list[Tensor | None]:
        """Allocate the whole tensor, with this replica's rows in it. Return the view for each replica's rows."""
        whole = self.arriving[parameter] = self._allocated(parameter)
        own = self._shards.own(parameter, whole)
        if own is not None:
            own.copy_(parameter.detach())
        return self._shards.parts(parameter, whole)

    def _allocated(self, parameter: nn.Parameter) -> Tensor:
        return torch.empty(self._shards.shape(parameter), dtype=parameter.dtype, device=parameter.device)

    def wait(self) -> None:
        """Wait for the whole weights, and assign them to the parameters. Does nothing if this has been done."""
        if not self.arriving:
            return
        self._wait()
        for parameter, whole in self.arriving.items():
            parameter.data = whole
            if whole.is_cuda:
                whole.record_stream(torch.cuda.current_stream(whole.device))  # another stream has allocated it
        self._gathered = [*self.arriving]
        self.arriving = {}
        self._follow()  # frees the rows

    def _wait(self) -> None:
        if self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.wait(self._spread.check)

    @torch.no_grad()
    def release(self, *, failed: bool = False) -> None:
        """Free the whole weights after their last use in a run, and keep this replica's rows.

        Does nothing if this has been done. ``failed`` states whether the run has failed.
        """
        if self.arriving and not failed:  # a run that did not use the stage
            self._wait()
        self._ticket = None
        self.arriving = {}
        if not self._gathered:
            return
        for parameter in self._gathered:
            if self._stays_whole(parameter):  # it was frozen when it was divided
                self._divided.discard(parameter)
            else:
                self._cut(parameter)
        self._gathered = []
        self._follow()

    @torch.no_grad()
    def assemble(self, exchange: _Exchange) -> None:
        """Between runs: make the parameters whole until ``divide`` or the next run. Collective over the replicas."""
        self.divide()  # in some replicas they may be whole already
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
