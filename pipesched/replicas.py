"""Replicas: further copies of a part's layers, for stages that run on the weights of an earlier stage.

The first stage of a weight copy runs the user's own layers, its home. Every further one runs a copy on its own device,
with Parameters of its own: made equal to the home's before each run, and their gradients are added to the home's after
it. Chimera (Li & Hoefler 2021) and DualPipe (DeepSeek-AI 2024) run so.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipesched.errors import ExecutionError, GraphError
from pipesched.graph import hooks_of

__all__ = ["Replica", "Replicas"]

_SETTINGS = (bool, int, float, str)  # as a module's mode and the p of a Dropout


class Replica:
    """A copy of a part's layers, and of the loss module beside them; what they share they also share as copies.

    Module hooks that are registered before serve both. Raises GraphError for layers that cannot be copied.
    """

    def __init__(
        self, layers: Mapping[str, nn.Module], loss_fn: Callable[[Any, Any], Any] | None, device: torch.device
    ) -> None:
        modules = [*layers.values(), *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
        self._home = nn.ModuleList(modules)
        try:
            self._copy = copy.deepcopy(self._home, _kept(self._home)).to(device)
        except Exception as error:
            raise GraphError(
                f"a schedule of several chains runs copies of the layers; one of {', '.join(layers)} cannot be copied "
                f"({error}); use a schedule of one chain, such as dualpipe-v"
            ) from error
        copies = list(self._copy)
        self.loss_fn = copies[-1] if isinstance(loss_fn, nn.Module) else loss_fn
        self.layers = dict(zip(layers, copies, strict=False))

    def refresh(self) -> None:
        """Take over the home's weights and buffers, what of them is trained, its modules' modes and other settings."""
        for theirs, mine in self._pairs("named_modules"):
            settings = {name: value for name, value in vars(theirs).items() if isinstance(value, _SETTINGS)}
            vars(mine).update(settings)
        for theirs, mine in self._pairs("named_buffers"):
            _copy_into(mine, theirs)
        for theirs, mine in self._pairs("named_parameters"):
            _copy_into(mine, theirs)
            mine.requires_grad_(theirs.requires_grad)

    def deliver(self) -> None:
        """Add the gradients to the home's, through its hooks, and clear them."""
        for theirs, mine in self._pairs("named_parameters"):
            grad, mine.grad = mine.grad, None
            if grad is not None:
                torch.autograd.backward((theirs,), (grad.to(theirs.device),))

    def discard(self) -> None:
        """Clear the gradients."""
        self._copy.zero_grad()

    def _pairs(self, named: str) -> Iterator[tuple[Any, Any]]:
        """(the home's, this copy's), by name."""
        home, mine = (dict(getattr(modules, named)()) for modules in (self._home, self._copy))
        if home.keys() != mine.keys():
            raise ExecutionError(
                f"the layers that a pipeline has copied stay as they are; {min(home.keys() ^ mine.keys())!r} has come "
                f"or gone since; make a new Pipeline"
            )
        return ((home[name], mine[name]) for name in home)


class Replicas(list[Replica]):
    """All replicas of a pipeline, in the order of their stages."""

    def refresh(self) -> None:
        """Make all equal to their homes."""
        for replica in self:
            replica.refresh()

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Around a run that computes gradients: add them to the homes' in stage order, or drop them where it fails."""
        try:
            yield
            for replica in self:
                replica.deliver()
        finally:
            for replica in self:
                replica.discard()


def _kept(home: nn.Module) -> dict[int, Any]:
    """What is not copied with the modules, for deepcopy: hooks, and what they belong to, where it is none of these."""
    own = set(home.modules())
    hooks = [hook for module in own for hook in hooks_of(module)]
    owners = [getattr(hook, "__self__", hook) for hook in hooks]
    return {id(owner): owner for owner in owners if owner not in own}


@torch.no_grad()
def _copy_into(mine: Tensor, theirs: Tensor) -> None:
    """Not counted as a modification: passes that are open still see the values that they saw, or the home tells."""
    if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape):
        mine.data.copy_(theirs)
    else:
        mine.data = theirs.detach().to(mine.device, copy=True)
