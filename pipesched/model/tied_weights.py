"""Tied weights: one leaf tensor per use of a shared weight, so that every plan adds gradients in the same order.

A leaf shares the Parameter's memory or, if its stage is on another device, is a copy. The leaf accumulates the
gradients of all micro-batches. After a run, the leaves' gradients are added in call order, and the sum is added to the
Parameter's ``.grad``; the Parameter's hooks run once. The result is therefore independent of the stages in which the
calls run.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.tensors.exchange import Move, Trade, copy_into, moved
from pipesched.tensors.meta_tensors import give_contents
from pipesched.tensors.tensor_attributes import with_attributes_of
from pipesched.tensors.tensor_contents import set_data
from pipesched.tensors.tree_structure import map_tensors

__all__ = ["Place", "Ties", "Use", "deliver", "with_stand_ins"]

#: (layer, number of the layer's call); the layer is empty for a function between layers.
Place = tuple[str, int]


def with_stand_ins(value: Any, stand_ins: Mapping[nn.Parameter, Tensor] | Mapping[Tensor, Tensor]) -> Any:
    """Replace tied weights or buffers inside a value with their stand-ins."""
    given: Mapping[Any, Tensor] = stand_ins
    return map_tensors(lambda tensor: given.get(tensor, tensor), value)


def _follow(leaf: Tensor, parameter: nn.Parameter, device: torch.device) -> None:
    """Make a leaf share its weight's current memory or, on another device, hold a copy of the weight.

    While the weight is on the meta device, the leaf is on the meta device, too.
    """
    if leaf.is_meta and not parameter.is_meta:
        give_contents(leaf, parameter.data.to(device))
    elif leaf.data_ptr() != parameter.data_ptr():
        set_data(leaf, parameter.detach().to(device))
    with_attributes_of(parameter, leaf)


def deliver(parameter: nn.Parameter, grads: Iterable[Tensor | None]) -> None:
    """Add gradients in the given order, run the parameter's hooks on the sum, and add the result to ``.grad``."""
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            here = grad.to(parameter.device)
            total = here if total is None else total + here
    if total is not None:
        torch.autograd.backward((parameter,), (total,))


@dataclass(frozen=True)
class Use:
    """The names of the parameters that a call uses, and the rank that runs the call."""

    place: Place
    rank: int
    names: Sequence[str]


@dataclass(frozen=True)
class _Tie:
    """A shared weight, with a leaf tensor for each call that uses the weight."""

    parameter: nn.Parameter
    #: The rank of the first use, which holds the Parameter and gets the gradient.
    home: int
    ranks: Mapping[Place, int]
    leaves: Mapping[Place, Tensor]

    def others(self) -> list[int]:
        return sorted({*self.ranks.values()} - {self.home})

    def taken(self, rank: int) -> list[Tensor | None]:
        """Return the gradients of the leaves on a rank, and set ``.grad`` of these leaves to None."""
        leaves = [leaf for place, leaf in self.leaves.items() if self.ranks[place] == rank]
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def deliver(self, grads: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Add the gradients of all uses in call order, and add the sum to the parameter's ``.grad``.

        ``grads`` maps each rank to the gradients of the leaves on this rank.
        """
        left = {rank: iter(values) for rank, values in grads.items()}
        deliver(self.parameter, [next(left[rank]) for rank in self.ranks.values()])


class Ties:
    """The tied weights of a model. ``uses`` lists the calls that use parameters, in call order."""

    def __init__(self, model: nn.Module, uses: Sequence[Use], trade: Trade) -> None:
        self._trade = trade
        self._devices: dict[Place, torch.device] = {}
        named = dict(model.named_parameters())
        ranks: dict[str, dict[Place, int]] = {}
        for use in uses:
            for name in use.names:
                ranks.setdefault(name, {})[use.place] = use.rank
        self._all = {
            named[name]: _Tie(
                parameter=named[name],
                home=next(iter(places.values())),
                ranks=places,
                leaves={place: named[name].data.requires_grad_() for place in places},
            )
            for name, places in ranks.items()
            if len(places) > 1
        }

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """The parameters that several calls use."""
        return self._all.keys()

    def for_layers(self, layers: Mapping[str, nn.Module], device: torch.device) -> dict[Place, dict[str, Tensor]]:
        """Return, for each call of these layers, the leaves on this device that replace tied weights."""
        own: dict[Place, dict[str, Tensor]] = {}
        for name, layer in layers.items():
            for key, parameter in layer.named_parameters():
                tie = self._all.get(parameter)
                for place, leaf in tie.leaves.items() if tie else ():
                    if place[0] == name:
                        self._devices[place] = device
                        _follow(leaf, parameter, device)
                        own.setdefault(place, {})[key] = leaf
        return own

    def stand_ins(self, place: Place, device: torch.device) -> dict[nn.Parameter, Tensor]:
        """Return the leaves that replace tied weights in a call, including weights passed as arguments."""
        given = {tie.parameter: tie.leaves[place] for tie in self._all.values() if place in tie.leaves}
        self._devices[place] = device
        for parameter, leaf in given.items():
            _follow(leaf, parameter, device)
        return given

    def leaves(self, rank: int) -> list[Tensor]:
        """Return the leaf tensors of tied weights for the calls that run on a rank."""
        return [leaf for tie in self._all.values() for place, leaf in tie.leaves.items() if tie.ranks[place] == rank]

    def own(self, parameter: nn.Parameter, rank: int) -> Tensor:
        """Return the tensor that accumulates a parameter's gradient on a rank.

        This is a leaf if the parameter is tied and a call on this rank uses it, else the parameter itself.
        """
        tie = self._all.get(parameter)
        places = [] if tie is None else [place for place, at in tie.ranks.items() if at == rank]
        return tie.leaves[places[0]] if tie and places else parameter

    def refresh(self) -> None:
        """Before a run, send each tied weight from the rank of its first use to the other ranks, and update the leaves.

        Collective.
        """
        moves: list[Move] = [
            (tie.home, rank, tie.parameter.detach) for tie in self._all.values() for rank in tie.others()
        ]
        targets = [(tie.parameter, rank) for tie in self._all.values() for rank in tie.others()]
        for (parameter, rank), value in zip(targets, moved(self._trade, "tied weights", moves), strict=True):
            if self._trade.holds(rank) and value.data_ptr() != parameter.data_ptr():
                copy_into(parameter, value)
        for parameter, tie in self._all.items():
            for place, leaf in tie.leaves.items():
                leaf.grad = None
                leaf.requires_grad_(parameter.requires_grad)
                _follow(leaf, parameter, self._devices.get(place, leaf.device))

    def deliver(self) -> None:
        """Add the gradients of tied weights to ``.grad`` on the rank that uses them first. Collective."""
        pairs = [(tie, rank) for tie in self._all.values() for rank in tie.others()]
        moves: list[Move] = [(rank, tie.home, partial(tie.taken, rank)) for tie, rank in pairs]
        arrived: dict[nn.Parameter, dict[int, Any]] = {}
        for (tie, rank), grads in zip(pairs, moved(self._trade, "gradients of tied weights", moves), strict=True):
            arrived.setdefault(tie.parameter, {})[rank] = grads
        for tie in self._all.values():
            if self._trade.holds(tie.home):
                tie.deliver({tie.home: tie.taken(tie.home), **arrived.get(tie.parameter, {})})
