"""Idle optimizer: warns if the optimizers that ran after the first step hold none of the pipeline's parameters."""

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import finalize, ref

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from pipesched.tensors.sampled_values import digest_of_values
from pipesched.units import counted
from pipesched.user_warning import warn

__all__ = ["IdleOptimizer"]


class IdleOptimizer:
    """Notes which optimizers run between the first step of a pipeline and the next step."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._values = b""
        self._kinds: set[str] = set()
        self._holds = False
        #: Whether `watch` is still to be called.
        self.waits = True
        #: Whether an optimizer has run since `watch` was called.
        self.ran = False

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Watch all optimizers from now on. ``parameters`` are those of this process's stages."""
        self.waits = False
        trained = _trained(parameters)
        self._ids = {id(parameter) for parameter in trained}
        self._values = digest_of_values(trained, devices=True)
        if trained:
            hook = register_optimizer_step_post_hook(partial(_note, ref(self)))
            self._end = finalize(self, hook.remove)

    def check(self, parameters: Iterable[nn.Parameter]) -> None:
        """Warn if no optimizer that ran holds a parameter of the pipeline. Ends the watch."""
        self._end()
        self.ran = False
        trained = _trained(parameters)
        if not self._holds and digest_of_values(trained, devices=True) == self._values:
            warn(
                f"an optimizer must hold the pipeline's parameters to train them; after the first step, "
                f"{' and '.join(sorted(self._kinds))} ran without any of the {counted(len(trained), 'parameter')} "
                f"that this process trains, and none of these has changed; make the optimizer from pipe.parameters()"
            )

    def note(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has run."""
        self._kinds.add(f"{type(optimizer).__name__}.step()")
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._holds |= any(id(parameter) in self._ids for parameter in held)
        self.ran = True


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _note(watch: "ref[IdleOptimizer]", optimizer: Optimizer, *given: Any) -> None:
    found = watch()
    if found is not None:
        found.note(optimizer)
