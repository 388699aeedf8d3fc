"""Kept buffers: after a failed step, buffers such as running statistics have the values from before the step.

The first step copies all buffers, and shows which of them steps change. Later steps copy only these.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipesched.tensors.meta_tensors import is_expanded
from pipesched.tensors.torch_functions import version_of

__all__ = ["KeptBuffers"]


class _Kept(NamedTuple):
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


class KeptBuffers:
    """The buffers of some modules and of their submodules."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self._changing: set[tuple[nn.Module, str]] | None = None
        #: Whether steps change no buffer, as the first step has shown.
        self.idle = False

    @contextmanager
    def unless_it_succeeds(self) -> Iterator[None]:
        """Restore the buffers if the ``with`` block raises an error."""
        kept = self._kept()
        try:
            yield
        except BaseException:
            _restore(kept)
            raise
        if self._changing is None:
            self._changing = {(one.module, one.name) for one in kept if one.changed}
            self.idle = not self._changing

    @torch.no_grad()
    def _kept(self) -> list[_Kept]:
        if self._changing is None:
            places = [(module, name) for root in self._roots for module in root.modules() for name in _buffers(module)]
        else:
            places = list(self._changing)
        kept = []
        for module, name in dict.fromkeys(places):
            buffer = _buffers(module).get(name)
            if buffer is not None and not buffer.is_meta:
                copy = None if is_expanded(buffer) else buffer.clone()
                kept.append(_Kept(module, name, buffer, version_of(buffer), copy))
        return kept


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False))


@torch.no_grad()
def _restore(kept: Sequence[_Kept]) -> None:
    for one in kept:
        if not isinstance(one.module, torch.jit.ScriptModule):  # scripted code cannot replace a buffer
            one.module._buffers[one.name] = one.buffer
        if one.copy is not None and not torch.equal(one.buffer, one.copy):
            one.buffer.copy_(one.copy)
