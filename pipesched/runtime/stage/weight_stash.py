"""Weight stash: keeps older versions of a stage's weights for micro-batches that are in flight during an update.

A version is a set of leaf tensors that share memory with the Parameters but have their own version counters.
``torch.func.functional_call`` runs the user's layers with these tensors. The gradients of a version are passed on to
the Parameters, and the Parameters' hooks run. Before an update changes weights that are still in use, the Parameters
move to new memory and the version keeps the old memory. PipeDream calls this weight stashing (Narayanan et al. 2019).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.devices.streams import used_here
from pipesched.program.weight_versions import Uses
from pipesched.tensors.tensor_attributes import with_attributes_of

__all__ = ["Tensors", "WeightStash"]

#: The tensors of one version, keyed first by module name and then by parameter name.
Tensors = dict[str, dict[str, Tensor]]
#: (tensor of a version, its gradient) pairs.
_Arrived = list[tuple[Tensor, Tensor]]


class _ModuleHolder(nn.Module):
    """A module that contains several modules, so that ``functional_call`` can replace the weights of all of them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, act: Callable[[], None]) -> None:
        act()


class WeightStash:
    """Keeps the versions of one stage's weights that micro-batches in flight use.

    Args:
        modules: the modules of the stage, keyed by name.
        uses: the version that each micro-batch uses.

    """

    def __init__(self, modules: Mapping[str, Any], uses: Uses) -> None:
        self._modules = {name: module for name, module in modules.items() if isinstance(module, nn.Module)}
        self._holder = _ModuleHolder(self._modules.values())
        self._uses = uses
        self._end: int | None = None
        self._newest = 0
        self._held: dict[int, Tensors] = {}
        self._waiting: dict[int, set[int]] = {}  # version -> micro-batches that still need it
        self._live: dict[Tensor, nn.Parameter] = {}
        self._begin_version()

    @property
    def held(self) -> list[int]:
        """The versions in memory, including the newest."""
        return sorted({*self._held, self._newest})

    def used_by(self, microbatch: int) -> Tensors:
        """Return the weight version that a micro-batch's forward, recompute and backward use."""
        return self._held[self._uses.version(microbatch)]

    def during(self, weights: Tensors, act: Callable[[], None]) -> None:
        """Call ``act``, which runs a backward pass, while the modules use ``weights``.

        Layers that use torch.utils.checkpoint then recompute with ``weights``.
        """
        tensors = {
            f"held.{index}.{key}": tensor
            for index, named in enumerate(weights.values())
            for key, tensor in named.items()
        }
        torch.func.functional_call(self._holder, tensors, (act,))

    def live(self, tensor: Tensor) -> Tensor:
        """Return the Parameter that a version's tensor belongs to. Any other tensor is returned unchanged."""
        return self._live.get(tensor, tensor)

    def taken(self, weights: Tensors) -> _Arrived:
        """Return the gradients accumulated in a version's tensors, and reset them to None."""
        tensors = (tensor for named in weights.values() for tensor in named.values())
        arrived = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]
        for tensor, _ in arrived:
            tensor.grad = None
        return arrived

    def deliver(self, arrived: _Arrived) -> None:
        """Accumulate a version's gradients into the Parameters' ``.grad``."""
        if arrived:
            torch.autograd.backward([self._live[tensor] for tensor, _ in arrived], [grad for _, grad in arrived])

    def ended(self, microbatch: int) -> None:
        """Record that a micro-batch's backward pass is done, and drop versions that no micro-batch needs."""
        version = self._uses.version(microbatch)
        self._waiting[version].discard(microbatch)
        self._drop_unused()

    def before_update(self) -> None:
        """Prepare for an update: if the newest version is still needed, move the Parameters to new memory."""
        if self._waiting[self._newest]:
            for name, named in self._held[self._newest].items():
                parameters = dict(self._modules[name].named_parameters())
                for key in named:
                    parameters[key].data = used_here(parameters[key].data).clone()

    def after_update(self) -> None:
        """Make the updated Parameters the newest version."""
        self._newest += 1
        self._begin_version()
        self._drop_unused()

    def end_at(self, num_microbatches: int) -> None:
        """Set the number of micro-batches, and drop versions that only later micro-batches would have used."""
        self._end = num_microbatches
        for version, waiting in self._waiting.items():
            self._waiting[version] = set(filter(self._comes, waiting))
        self._drop_unused()

    def _comes(self, microbatch: int) -> bool:
        return self._end is None or microbatch < self._end

    def _begin_version(self) -> None:
        self._waiting[self._newest] = set(filter(self._comes, self._uses.users(self._newest)))
        version: Tensors = {}
        for name, module in self._modules.items():
            own = {key: p for key, p in module.named_parameters() if p.requires_grad}
            version[name] = {key: with_attributes_of(p, p.data.requires_grad_()) for key, p in own.items()}
            self._live.update(zip(version[name].values(), own.values(), strict=True))
        self._held[self._newest] = version

    def _drop_unused(self) -> None:
        """Drop the versions that micro-batches no longer need.

        The newest version is always kept, because the Parameters share its memory.
        """
        for version in [v for v, waiting in self._waiting.items() if not waiting and v != self._newest]:
            del self._waiting[version]
            for named in self._held.pop(version).values():
                for tensor in named.values():
                    del self._live[tensor]
