"""Weight copies: further copies of a part's layers, for stages that run on the weights of an earlier stage.

The first stage of a weight copy runs the user's own layers, its home. Every further one runs a copy on its own device,
with Parameters of its own: made equal to the home's before each run, and their gradients are added to the home's after
it. Chimera (Li & Hoefler 2021) and DualPipe (DeepSeek-AI 2024) run so.

Where ranks are processes, a home and its copy may lie in two of them. Both have the layers as the user made them, so
modes and other settings are those of the copy's own process; tensors travel, all that one rank has for another in one
message.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.errors import ExecutionError, GraphError
from pipesched.model.module_tree import hooks_of
from pipesched.tensors.exchange import Trade, copy_into, moved
from pipesched.tensors.meta_tensors import put_on

__all__ = ["WeightCopies"]

_SETTINGS = (bool, int, float, str)  # as a module's mode and the p of a Dropout
_Tensors = list[Tensor | None]


class _WeightCopy:
    """A copy of a part's layers, and of the loss module beside them; what they share they also share as copies.

    Module hooks that are registered before serve both. Raises GraphError for layers that cannot be copied.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], loss_fn: Callable[[Any, Any], Any] | None, device: torch.device
    ) -> None:
        self._home = _together(layers, loss_fn)
        try:
            self._copy = copy.deepcopy(self._home, _kept(self._home))
            put_on(self._copy, device)
        except Exception as error:
            raise GraphError(
                f"a schedule of several chains runs copies of the layers; one of {', '.join(layers)} cannot be copied "
                f"({error}); use a schedule of one chain, such as dualpipe-v"
            ) from error
        copies = list(self._copy)
        self.loss_fn = copies[-1] if isinstance(loss_fn, nn.Module) else loss_fn
        self.layers = dict(zip(layers, copies, strict=False))

    def refresh(self, state: Sequence[Tensor]) -> None:
        """Take over the home's weights and buffers, what of them is trained, its modules' modes and other settings."""
        for theirs, mine in self._pairs("named_modules"):
            settings = {name: value for name, value in vars(theirs).items() if isinstance(value, _SETTINGS)}
            vars(mine).update(settings)
        values = iter(state)
        for _, mine in self._pairs("named_buffers"):
            copy_into(mine, next(values))
        for theirs, mine in self._pairs("named_parameters"):
            copy_into(mine, next(values))
            mine.requires_grad_(theirs.requires_grad)

    def taken_grads(self) -> _Tensors:
        """The gradients of the copy's parameters, which then have none."""
        parameters = list(self._copy.parameters())
        grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return grads

    def _pairs(self, named: str) -> Iterator[tuple[Any, Any]]:
        """(the home's, this copy's), by name."""
        home, mine = (dict(getattr(modules, named)()) for modules in (self._home, self._copy))
        if home.keys() != mine.keys():
            raise ExecutionError(
                f"the layers that a pipeline has copied stay as they are; {min(home.keys() ^ mine.keys())!r} has come "
                f"or gone since; make a new Pipeline"
            )
        return ((home[name], mine[name]) for name in home)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A part's home, the ranks where it and its copy lie, and the copy, where that is in this process."""

    home: nn.ModuleList
    home_rank: int
    rank: int
    weight_copy: _WeightCopy | None


class WeightCopies:
    """All replicas of a pipeline, in the order of their stages.

    target(parameter, rank): what takes the gradients of a home's parameter.
    """

    def __init__(self, trade: Trade, target: Callable[[nn.Parameter, int], Tensor]) -> None:
        self._trade = trade
        self._target = target
        self._all: list[_Pair] = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._all)

    def add(
        self,
        layers: Mapping[str, nn.Module],
        loss_fn: Callable[[Any, Any], Any] | None,
        device: torch.device,
        ranks: tuple[int, int],
    ) -> _WeightCopy | None:
        """Make one. ranks: of the home and of the copy. None where the copy lies in another process."""
        weight_copy = _WeightCopy(layers, loss_fn, device) if self._trade.holds(ranks[1]) else None
        home_rank, rank = ranks
        home = _together(layers, loss_fn)
        self._all.append(_Pair(home=home, home_rank=home_rank, rank=rank, weight_copy=weight_copy))
        return weight_copy

    def refresh(self) -> None:
        """Make all equal to their homes. Collective over processes."""
        moves = [(pair.home_rank, pair.rank, partial(_state, pair.home)) for pair in self._all]
        for pair, state in zip(self._all, moved(self._trade, "weights", moves), strict=True):
            if pair.weight_copy is not None:
                pair.weight_copy.refresh(state)

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Around a run that computes gradients: add them to the homes' in stage order, or drop them where it fails.

        Collective over processes.
        """
        try:
            yield
            moves = [(pair.rank, pair.home_rank, _taking(pair.weight_copy)) for pair in self._all]
            for pair, grads in zip(self._all, moved(self._trade, "gradients", moves), strict=True):
                if self._trade.holds(pair.home_rank):
                    _deliver([self._target(p, pair.home_rank) for p in pair.home.parameters()], grads)
        finally:
            for pair in self._all:
                if pair.weight_copy is not None:
                    pair.weight_copy.taken_grads()


def _together(layers: Mapping[str, nn.Module], loss_fn: Callable[[Any, Any], Any] | None) -> nn.ModuleList:
    return nn.ModuleList([*layers.values(), *([loss_fn] if isinstance(loss_fn, nn.Module) else [])])


def _state(home: nn.ModuleList) -> list[Tensor]:
    return [tensor.detach() for tensor in (*home.buffers(), *home.parameters())]


def _taking(weight_copy: _WeightCopy | None) -> Callable[[], _Tensors]:
    return weight_copy.taken_grads if weight_copy is not None else list


def _deliver(targets: Sequence[Tensor], grads: _Tensors) -> None:
    """Add gradients to the home's, through its hooks."""
    for target, grad in zip(targets, grads, strict=True):
        if grad is not None:
            torch.autograd.backward((target,), (grad.to(target.device),))


def _kept(home: nn.Module) -> dict[int, Any]:
    """What is not copied with the modules, for deepcopy: hooks, and what they belong to, where it is none of these."""
    own = set(home.modules())
    hooks = [hook for module in own for hook in hooks_of(module)]
    owners = [getattr(hook, "__self__", hook) for hook in hooks]
    return {id(owner): owner for owner in owners if owner not in own}
