"""Weight stash: the versions of a stage's weights that micro-batches in flight use, while the optimizer makes newer
ones.

A version is a set of tensors that share memory with the live Parameters: leaves with a version counter of their own,
on which ``torch.func.functional_call`` runs the user's layers. What gradient arrives at them is handed on to the live
Parameters, whose hooks fire. Before an update changes weights that are still used, the Parameters move to new memory
and leave the old to the version (weight stashing: PipeDream, Narayanan et al. 2019).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.program.weight_versions import Uses
from pipesched.tensors.payload import used_here

__all__ = ["Tensors", "WeightStash"]

#: The tensors of one version by module and name.
Tensors = dict[str, dict[str, Tensor]]
#: Tensors of a version, each with the gradient that arrived at it.
_Arrived = list[tuple[Tensor, Tensor]]


class _Holder(nn.Module):
    """Modules under one name, to be given other weights while something else runs."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)

    def forward(self, act: Callable[[], None]) -> None:
        act()


class WeightStash:
    """One stage's versions. modules: by name. uses: which micro-batch uses which."""

    def __init__(self, modules: Mapping[str, Any], uses: Uses) -> None:
        self._modules = {name: module for name, module in modules.items() if isinstance(module, nn.Module)}
        self._holder = _Holder(self._modules.values())
        self._uses = uses
        self._end: int | None = None
        self._newest = 0
        self._held: dict[int, Tensors] = {}
        self._waiting: dict[int, set[int]] = {}  # who has still to use a version
        self._live: dict[Tensor, nn.Parameter] = {}
        self._begin_version()

    @property
    def held(self) -> list[int]:
        """The versions in memory, the newest included."""
        return sorted({*self._held, self._newest})

    def used_by(self, microbatch: int) -> Tensors:
        """The weights that a micro-batch uses, forward, recomputed and backward."""
        return self._held[self._uses.version(microbatch)]

    def during(self, weights: Tensors, act: Callable[[], None]) -> None:
        """Act while the modules hold a version: a backward may call them again (torch.utils.checkpoint), or look."""
        tensors = {
            f"held.{index}.{key}": tensor
            for index, named in enumerate(weights.values())
            for key, tensor in named.items()
        }
        torch.func.functional_call(self._holder, tensors, (act,))

    def live(self, tensor: Tensor) -> Tensor:
        """The Parameter of which a tensor is a version; any other tensor itself."""
        return self._live.get(tensor, tensor)

    def taken(self, weights: Tensors) -> _Arrived:
        """The gradients that have arrived at a version, which then has none."""
        tensors = (tensor for named in weights.values() for tensor in named.values())
        arrived = [(tensor, tensor.grad) for tensor in tensors if tensor.grad is not None]
        for tensor, _ in arrived:
            tensor.grad = None
        return arrived

    def deliver(self, arrived: _Arrived) -> None:
        """Hand the gradients of a version to the live Parameters."""
        if arrived:
            torch.autograd.backward([self._live[tensor] for tensor, _ in arrived], [grad for _, grad in arrived])

    def ended(self, microbatch: int) -> None:
        """A micro-batch's backward is done. A version that nobody waits for is dropped."""
        version = self._uses.version(microbatch)
        self._waiting[version].discard(microbatch)
        self._drop_unused()

    def before_update(self) -> None:
        """The next update may change the live Parameters: a version that is still used keeps its memory."""
        if self._waiting[self._newest]:
            for name, named in self._held[self._newest].items():
                parameters = dict(self._modules[name].named_parameters())
                for key in named:
                    parameters[key].data = used_here(parameters[key].data).clone()

    def after_update(self) -> None:
        """The live Parameters are the next version."""
        self._newest += 1
        self._begin_version()
        self._drop_unused()

    def end_at(self, num_microbatches: int) -> None:
        """No further micro-batches come: what only they would have used is dropped."""
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
            version[name] = {key: p.data.requires_grad_() for key, p in own.items()}
            self._live.update(zip(version[name].values(), own.values(), strict=True))
        self._held[self._newest] = version

    def _drop_unused(self) -> None:
        """The newest stays: it is the Parameters."""
        for version in [v for v, waiting in self._waiting.items() if not waiting and v != self._newest]:
            del self._waiting[version]
            for named in self._held.pop(version).values():
                for tensor in named.values():
                    del self._live[tensor]
