"""Weight copies: copies of layers for stages that share the weights of an earlier stage.

If several stages have the same weights, the first of these stages runs the user's own layers, called the home. Every
other stage runs a copy of these layers on its own device with its own Parameters. Before each run, the home's tensors
are copied to all copies; after the run, the copies' gradients are added to the home's gradients. Chimera (Li & Hoefler
2021) and DualPipe (DeepSeek-AI 2024) use such stages.

With one process per rank, the home and a copy may be in different processes. Both processes have the user's layers, so
the copy's process reads modes and other settings from its own layers. Only tensors are sent, in one message for each
pair of ranks.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.errors import ExecutionError, GraphError
from pipesched.model.attributes import OF_ALL_MODULES
from pipesched.model.module_tree import hooks_of
from pipesched.runtime.stage.run_parts import RunPart
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.exchange import Trade, copy_into, moved
from pipesched.tensors.meta_tensors import put_on
from pipesched.tensors.tensor_attributes import with_attributes_of

__all__ = ["WeightCopies"]

_SETTINGS = (bool, int, float, str, type(None), torch.dtype, torch.device)  # such as training, and the p of a Dropout
_NOT_COPIED = OF_ALL_MODULES - {"training"}
_Tensors = list[Tensor | None]


class _WeightCopy:
    """A copy of a stage's layers and of its loss module; tensors shared between layers are shared between their copies.

    Module hooks that were registered before the copy was made run for the original layers and for the copy. Raises
    GraphError for layers that cannot be copied.
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
                f"a schedule with several chains of stages needs copies of the layers; one of {', '.join(layers)} "
                f"cannot be copied ({error}); use a schedule with a single chain of stages, such as dualpipe-v"
            ) from error
        copies = list(self._copy)
        self.loss_fn = copies[-1] if isinstance(loss_fn, nn.Module) else loss_fn
        self.layers = dict(zip(layers, copies, strict=False))

    def refresh(self, state: Sequence[Tensor]) -> None:
        """Copy the tensors, ``requires_grad`` flags, modes and other settings of the original layers to this copy.

        ``state`` contains the buffers of the original layers, then their parameters.
        """
        for theirs, mine in self._pairs("named_modules"):
            for name, value in vars(theirs).items():
                if isinstance(value, _SETTINGS):
                    vars(mine)[name] = value
                elif name not in _NOT_COPIED and _is_setting(value):
                    vars(mine)[name] = copy.deepcopy(value)
        values = iter(state)
        for theirs, mine in self._pairs("named_buffers"):
            copy_into(with_attributes_of(theirs, mine), next(values))
        for theirs, mine in self._pairs("named_parameters"):
            copy_into(with_attributes_of(theirs, mine), next(values))
            mine.requires_grad_(theirs.requires_grad)

    def taken_grads(self) -> _Tensors:
        """Return the gradients of the copy's parameters, and reset them to None."""
        parameters = list(self._copy.parameters())
        grads = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return grads

    def _pairs(self, named: str) -> Iterator[tuple[Any, Any]]:
        """Pair each entry of the original layers with the copy's entry of the same name.

        ``named`` is the method that lists the entries, such as "named_parameters". Raises ExecutionError if the names
        differ.
        """
        home, mine = (dict(getattr(modules, named)()) for modules in (self._home, self._copy))
        if home.keys() != mine.keys():
            raise ExecutionError(
                f"layers that a pipeline has copied must keep their modules and tensors; "
                f"{min(home.keys() ^ mine.keys())!r} was added or removed; make a new Pipeline"
            )
        return ((home[name], mine[name]) for name in home)


def _is_setting(value: Any) -> bool:
    """Return whether a value is a setting, or a container of settings."""
    if type(value) in (list, tuple, set):
        return all(map(_is_setting, value))
    return isinstance(value, _SETTINGS) or (type(value) is dict and all(map(_is_setting, value.values())))


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A weight copy (None if it is in another process), the original layers (``home``), and the ranks of both."""

    home: nn.ModuleList
    home_rank: int
    rank: int
    weight_copy: _WeightCopy | None


class WeightCopies(RunPart):
    """All weight copies of a pipeline, in stage order.

    ``target`` takes a parameter of the original layers and the rank of these layers, and returns the tensor whose
    ``.grad`` accumulates the gradients from the copies of this parameter.
    """

    def __init__(self, trade: Trade, target: Callable[[nn.Parameter, int], Tensor]) -> None:
        self._trade = trade
        self._target = target
        self._all: list[_Pair] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(
        self,
        layers: Mapping[str, nn.Module],
        loss_fn: Callable[[Any, Any], Any] | None,
        device: torch.device,
        ranks: tuple[int, int],
    ) -> _WeightCopy | None:
        """Create a copy of a stage's layers; return None if the copy is in another process.

        ``ranks`` contains the rank of the original layers and the rank of the copy.
        """
        weight_copy = _WeightCopy(layers, loss_fn, device) if self._trade.holds(ranks[1]) else None
        home_rank, rank = ranks
        home = _together(layers, loss_fn)
        self._all.append(_Pair(home=home, home_rank=home_rank, rank=rank, weight_copy=weight_copy))
        return weight_copy

    def refresh(self) -> None:
        """Copy the tensors and settings of the original layers to all copies. Collective over processes."""
        moves = [(pair.home_rank, pair.rank, partial(_state, pair.home)) for pair in self._all]
        for pair, state in zip(self._all, moved(self._trade, "weights", moves), strict=True):
            if pair.weight_copy is not None:
                pair.weight_copy.refresh(state)

    def after_run(self, step_data: StepData) -> None:
        """Add the copies' gradients to the originals' gradients, in stage order. Collective over processes."""
        moves = [(pair.rank, pair.home_rank, _taking(pair.weight_copy)) for pair in self._all]
        for pair, grads in zip(self._all, moved(self._trade, "gradients", moves), strict=True):
            if self._trade.holds(pair.home_rank):
                _deliver([self._target(p, pair.home_rank) for p in pair.home.parameters()], grads)
        self.failed()

    def failed(self) -> None:
        """Drop the gradients of the copies."""
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
    """Add gradients to the targets through autograd, so that hooks run."""
    for target, grad in zip(targets, grads, strict=True):
        if grad is not None:
            torch.autograd.backward((target,), (grad.to(target.device),))


def _kept(home: nn.Module) -> dict[int, Any]:
    """Return a memo for ``deepcopy``, so that a copy of ``home`` shares the hooks of ``home`` instead of copying them.

    The copy also shares the objects whose methods are hooks, except modules of ``home``.
    """
    own = set(home.modules())
    hooks = [hook for module in own for hook in hooks_of(module)]
    owners = [getattr(hook, "__self__", hook) for hook in hooks]
    return {id(owner): owner for owner in owners if owner not in own}
