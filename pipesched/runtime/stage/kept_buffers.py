"""Kept buffers: after a failed step, buffers such as running statistics have the values from before the step.

The first step copies all buffers, and shows which of them steps change. Later steps copy only these.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipesched.runtime.stage.run_parts import RunPart
from pipesched.runtime.stage.step_data import StepData
from pipesched.tensors.meta_tensors import is_expanded
from pipesched.tensors.torch_functions import version_of

__all__ = ["KeptBuffers"]


class _BufferBefore(NamedTuple):
    """A buffer before a step."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor | None

    @property
    def changed(self) -> bool:
        """Whether the step has written to the buffer, or replaced it.

        Values are compared, because some operators change a tensor without incrementing its version counter.
        """
        if version_of(self.buffer) != self.version or _buffers(self.module).get(self.name) is not self.buffer:
            return True
        return self.copy is not None and not torch.equal(self.buffer, self.copy)


class KeptBuffers(RunPart):
    """The buffers of some modules and of their submodules, which a failed run restores."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        #: The buffers that steps change, as the first step has shown; None before the first step.
        self._changing: set[tuple[nn.Module, str]] | None = None
        self._before: list[_BufferBefore] = []

    @property
    def exist(self) -> bool:
        """Whether a module has a buffer."""
        return any(True for root in self._roots for _ in root.buffers())

    def begin(self, step_data: StepData) -> None:
        if self._changing is None or self._changing:
            self._before = self._kept()

    def after_run(self, step_data: StepData) -> None:
        if self._changing is None:
            self._changing = {(one.module, one.name) for one in self._before if one.changed}
        self._before = []

    def failed(self) -> None:
        _restore(self._before)
        self._before = []

    @torch.no_grad()
    def _kept(self) -> list[_BufferBefore]:
        if self._changing is None:
            places = [(module, name) for root in self._roots for module in root.modules() for name in _buffers(module)]
        else:
            places = list(self._changing)
        kept = []
        for module, name in dict.fromkeys(places):
            buffer = _buffers(module).get(name)
            if buffer is not None and not buffer.is_meta:
                copy = None if is_expanded(buffer) else buffer.clone()
                kept.append(_BufferBefore(module, name, buffer, version_of(buffer), copy))
        return kept


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False))


@torch.no_grad()
def _restore(kept: Sequence[_BufferBefore]) -> None:
    for one in kept:
        if not isinstance(one.module, torch.jit.ScriptModule):  # scripted code cannot replace a buffer
            one.module._buffers[one.name] = one.buffer
        if one.copy is not None and not torch.equal(one.buffer, one.copy):
            one.buffer.copy_(one.copy)
