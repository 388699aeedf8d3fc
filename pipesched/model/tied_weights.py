"""Tied weights: weights that several calls use, each through a leaf of its own, so that their gradients have one order.

A leaf shares the Parameter's memory, or is a copy on its stage's device. It sums over micro-batches; after a run the
sums are added in the order of the calls and handed to the Parameter, whose hooks fire once. So the result does not
depend on which stages the calls lie in.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.tensors.exchange import Move, Trade, copy_into, moved
from pipesched.tensors.meta_tensors import give_contents
from pipesched.tensors.payload import pytree

__all__ = ["Place", "Ties", "Use", "deliver", "with_stand_ins"]

#: (layer, number of its call); of a function between layers the layer is empty.
Place = tuple[str, int]


def with_stand_ins(value: Any, stand_ins: Mapping[nn.Parameter, Tensor] | Mapping[Tensor, Tensor]) -> Any:
    """A value with others in the place of tied weights, or of buffers."""
    return pytree.tree_map_only(Tensor, lambda tensor: stand_ins.get(tensor, tensor), value)


def _follow(leaf: Tensor, parameter: nn.Parameter, device: torch.device) -> None:
    """A leaf is what its weight is, on its stage's device; without contents as long as the weight has none."""
    if leaf.is_meta and not parameter.is_meta:
        give_contents(leaf, parameter.data.to(device))
    elif leaf.data_ptr() != parameter.data_ptr():
        leaf.data = parameter.detach().to(device)


def deliver(parameter: nn.Parameter, grads: Iterable[Tensor | None]) -> None:
    """Add up gradients in their order, and hand the sum to the parameter."""
    total: Tensor | None = None
    for grad in grads:
        if grad is not None:
            here = grad.to(parameter.device)
            total = here if total is None else total + here
    if total is not None:
        torch.autograd.backward((parameter,), (total,))


@dataclass(frozen=True)
class Use:
    """A call: the parameters that it uses, by their names in the model, and the rank where it runs."""

    place: Place
    rank: int
    names: Sequence[str]


@dataclass(frozen=True)
class _Tie:
    """A weight, the rank of its first use, where its gradients go, and a leaf for each use."""

    parameter: nn.Parameter
    home: int
    ranks: Mapping[Place, int]
    leaves: Mapping[Place, Tensor]

    def others(self) -> list[int]:
        return sorted({*self.ranks.values()} - {self.home})

    def taken(self, rank: int) -> list[Tensor | None]:
        """The gradients of the uses on a rank, which then have none."""
        leaves = [leaf for place, leaf in self.leaves.items() if self.ranks[place] == rank]
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def deliver(self, grads: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Add up what came to the uses, by rank, in the order of the calls."""
        left = {rank: iter(values) for rank, values in grads.items()}
        deliver(self.parameter, [next(left[rank]) for rank in self.ranks.values()])


class Ties:
    """The tied weights of a model. uses: in the order of the calls."""

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
        """Whether there are any."""
        return bool(self._all)

    @property
    def parameters(self) -> Collection[nn.Parameter]:
        """Those that several calls use."""
        return self._all.keys()

    def for_layers(self, layers: Mapping[str, nn.Module], device: torch.device) -> dict[Place, dict[str, Tensor]]:
        """What calls of these layers use in place of their own, on a device."""
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
        """What a call uses in place of tied weights, wherever they come from: also as its arguments."""
        given = {tie.parameter: tie.leaves[place] for tie in self._all.values() if place in tie.leaves}
        self._devices[place] = device
        for parameter, leaf in given.items():
            _follow(leaf, parameter, device)
        return given

    def leaves(self, rank: int) -> list[Tensor]:
        """Those of the uses on a rank."""
        return [leaf for tie in self._all.values() for place, leaf in tie.leaves.items() if tie.ranks[place] == rank]

    def own(self, parameter: nn.Parameter, rank: int) -> Tensor:
        """What takes a parameter's gradients on a rank: of a tied one the leaf of a use there, if there is one."""
        tie = self._all.get(parameter)
        places = [] if tie is None else [place for place, at in tie.ranks.items() if at == rank]
        return tie.leaves[places[0]] if tie and places else parameter

    def refresh(self) -> None:
        """Before a run: parameters are what they are at home, and leaves what the parameters are. Collective."""
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

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """After a run that has not failed the gradients go to the parameters, at home. Collective."""
        yield
        pairs = [(tie, rank) for tie in self._all.values() for rank in tie.others()]
        moves: list[Move] = [(rank, tie.home, partial(tie.taken, rank)) for tie, rank in pairs]
        arrived: dict[nn.Parameter, dict[int, Any]] = {}
        for (tie, rank), grads in zip(pairs, moved(self._trade, "gradients of tied weights", moves), strict=True):
            arrived.setdefault(tie.parameter, {})[rank] = grads
        for tie in self._all.values():
            if self._trade.holds(tie.home):
                tie.deliver({tie.home: tie.taken(tie.home), **arrived.get(tie.parameter, {})})
