"""Sharded modules: the modules of a stage whose weights ``fully_shard`` (FSDP2) has divided among several processes.

By itself, FSDP2 gathers the weights for each forward and backward, and reduces the gradients in each backward. A step
of m micro-batches then gathers each module's weights about 2m times, and reduces its gradients m times. With
ShardedModules, a run gathers each module's weights once, before its first forward. A step reduces each module's
gradients once, after the last backward of the stage.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.errors import ExecutionError

__all__ = ["ShardedModules"]


class ShardedModules:
    """The modules of one stage that ``fully_shard`` has sharded. All methods are collective over the shard group.

    Args:
        roots: the sharded modules that are not inside another sharded module.
        device: the device of the stage.
        once: whether a run gathers each module's weights and reduces its gradients only once. If False, each module's
            FSDP2 flags decide when to gather and reduce.

    """

    def __init__(self, roots: list[Any], device: torch.device, *, once: bool) -> None:
        self._roots = roots
        self._device = device
        self._once = once
        #: All sharded modules, in the order of their gathers.
        self._modules: list[Any] = [
            module for root in roots for module in root.modules() if isinstance(module, _sharded_type())
        ]
        self._gathers: list[Any] = []
        self._gathering = False
        self._casts = False  # whether MixedPrecisionPolicy gathers the weights in another dtype
        self._failed = False
        #: Whether a backward of this run has computed gradients.
        self.has_gradients = False
        self._shards: dict[nn.Parameter, None] = {}
        for root in roots:
            root.pipesched_pass = torch.clone  # runs between the hooks of FSDP2; a view would make FSDP2 warn
            _fsdp().register_fsdp_forward_method(root, "pipesched_pass")

    @classmethod
    def of(cls, module: nn.Module, device: torch.device, *, once: bool) -> "ShardedModules | None":
        """Return the sharded modules in a module, or None if there are none."""
        roots = list(_topmost(module)) if _fsdp() is not None else []
        return cls(roots, device, once=once) if roots else None

    @property
    def num_shards(self) -> int:
        """The largest number of processes that hold shards of one parameter."""
        meshes = [getattr(p, "device_mesh", None) for root in self._roots for p in root.parameters()]
        return max((mesh.size() for mesh in meshes if mesh is not None), default=1)

    @property
    def once(self) -> bool:
        """Whether a run gathers each module's weights and reduces its gradients only once."""
        return self._once

    def largest_unit(self) -> int:
        """Return the size in bytes of the largest module's full (unsharded) weights.

        The weights of a sharded module inside another sharded module count only for the inner module.
        """
        sizes: list[int] = []
        for module in self._modules:
            inner = [part for part in module.modules() if part is not module and part in self._modules]
            others = {p for part in inner for p in part.parameters()}
            sizes.append(sum(p.numel() * p.element_size() for p in module.parameters() if p not in others))
        return max(sizes)

    def sum_gradients(self) -> None:
        """Make FSDP2 sum the gradients across processes instead of averaging them."""
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it reduces

    def gather(self) -> None:
        """Start a run: begin to gather all weights, unless ``once`` is False. Does not wait for the weights.

        Raises ExecutionError if an earlier run has failed.
        """
        if self._failed:
            raise ExecutionError(
                "a stage that is sharded by fully_shard cannot run after a failed run, because fully_shard keeps "
                "gradients of the failed run; a run of this pipeline has failed; load a checkpoint into a new model "
                "and a new pipeline"
            )
        if not self._once:
            return
        self._gathering = True
        self.has_gradients = False
        self._shards = dict.fromkeys(self._parameters())
        self._keep_in_backward(True)
        self._keep_after_forward(True)
        self._gathers = [module.unshard(async_op=True) for module in self._modules]

    def wait(self) -> bool:
        """Wait for the weights. Return whether the weights stay gathered until ``reduce`` or ``release``."""
        if self._gathers:
            for gather in self._gathers:
                gather.wait()
            self._gathers = []
            pairs = zip(self._parameters(), self._shards, strict=True)
            self._casts = any(weight.dtype is not shard.dtype for weight, shard in pairs)
        return self._gathering

    def accumulate(self) -> None:
        """Add gradients computed outside FSDP2's backward to FSDP2's sums.

        Does nothing if FSDP2 sums in ``.grad``, which already contains these gradients. FSDP2 sums in other tensors
        only if it gathers the weights in a different dtype than the dtype of the shards.
        """
        if self._casts:
            for root in self._roots:
                self._pass(root)

    def reduce(self) -> None:
        """Reduce the gradients of all backwards of the step, and free the gathered weights.

        Raises ExecutionError if gradients of a module were not reduced.
        """
        if not self._gathering:
            return
        if not self.has_gradients:  # all losses of this process have weight 0, but other processes may have gradients
            self.wait()
            for weight in self._gathered():
                weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        self._keep_in_backward(False)
        for root in reversed(self._roots):
            self._pass(root)
        if self._gathered():
            raise ExecutionError(
                f"fully_shard must reduce the gradients of all modules at the end of a step; the gradients of "
                f"at least one of {len(self._modules)} modules were not reduced; pass Distributed(gather_once=False)"
            )

    def release(self, *, failed: bool) -> None:
        """End a run: free the gathered weights, and let FSDP2 gather and reduce in every forward and backward again."""
        self._gathering = False
        self._failed = self._failed or failed
        if not failed:  # after a failure, the wait might never end
            self.wait()  # for modules that the run did not use
        if self._once:
            self._keep_in_backward(False)
            self._keep_after_forward(False)
        for module in self._modules:
            module.reshard()

    def _keep_after_forward(self, keep: bool) -> None:
        """Set whether forwards keep the gathered weights."""
        for module in self._modules:
            module.set_reshard_after_forward(not keep, recurse=False)

    def _keep_in_backward(self, keep: bool) -> None:
        """Set whether backwards keep gathered weights and full gradients, or free the weights and reduce gradients."""
        for module in self._modules:
            module.set_reshard_after_backward(not keep, recurse=False)
            module.set_requires_gradient_sync(not keep, recurse=False)

    def _gathered(self) -> list[nn.Parameter]:
        """Return the weights that are currently gathered."""
        return [parameter for parameter in self._parameters() if parameter not in self._shards]

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for root in self._roots for parameter in root.parameters())

    def _pass(self, root: Any) -> None:
        """Run an empty backward pass through a module's hooks, so that FSDP2 processes the gradients computed so far.

        FSDP2 reduces the gradients across processes if ``_keep_in_backward(False)`` was called. Otherwise, it adds them
        to its local sums.
        """
        start: Tensor = torch.zeros((), device=self._device, requires_grad=True)
        root.pipesched_pass(start).backward()


def _fsdp() -> Any:
    """Return the module ``torch.distributed.fsdp``, whose import is slow; None if it has not been imported."""
    return sys.modules.get("torch.distributed.fsdp")


def _sharded_type() -> type:
    return _fsdp().FSDPModule  # type: ignore[no-any-return]


def _topmost(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, _sharded_type()):
        yield module
    else:
        for child in module.children():
            yield from _topmost(child)
