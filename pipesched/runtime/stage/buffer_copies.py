"""Buffer copies: the buffers that forwards write to. A backward sees them as its own micro-batch's forward has left
them.

Several micro-batches are in flight, and autograd keeps what the next forward would write over. So each forward writes
to copies, which autograd keeps, and the buffers take over what they hold.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipesched.errors import ExecutionError

__all__ = ["BufferCopies", "Buffers", "buffers_of", "own_buffers"]

#: One layer's buffers by name.
Buffers = dict[str, Tensor]


def own_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The buffers of a module, but for those of torch's own layers, which autograd never reads again once they change,
    such as running statistics: each one's name, and where it lies.
    """
    for prefix, part in module.named_modules():
        scripted = isinstance(part, torch.jit.ScriptModule)  # which takes no other tensors than its own
        if not scripted and not type(part).forward.__module__.startswith("torch.nn."):
            for key, buffer in part.named_buffers(recurse=False):
                if buffer is not None:
                    yield f"{prefix}.{key}".removeprefix("."), part, key


def buffers_of(layer: nn.Module) -> Buffers:
    """Copies of a layer's buffers, as they are now."""
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


class BufferCopies:
    """Those of one stage's modules. written: names of the model's tensors that its forwards write to.

    statistics_apart: running statistics are kept apart, and those buffers stay as they are.
    """

    def __init__(self, modules: Mapping[str, nn.Module], written: Collection[str], *, statistics_apart: bool) -> None:
        self._places: dict[str, dict[str, tuple[nn.Module, str]]] = {}
        for name, module in modules.items():
            for key, part, own in own_buffers(module):
                apart = statistics_apart and isinstance(getattr(part, "running_mean", None), Tensor)
                if not apart and not _names(name, key).isdisjoint(written):
                    self._places.setdefault(name, {})[key] = part, own

    def __bool__(self) -> bool:
        return bool(self._places)

    def copies(self) -> dict[str, Buffers]:
        """Copies of all, for a forward to write to."""
        return {name: {key: live.clone() for key, live in self._live(name)} for name in self._places}

    def note(self, name: str, own: Mapping[str, Tensor], copies: Mapping[str, Buffers]) -> None:
        """A module has been called on these; it may have put other tensors in the place of copies."""
        for key in self._places.get(name, ()):
            copies[name][key] = own[key]

    def take_over(self, copies: Mapping[str, Buffers]) -> None:
        """The buffers hold what a forward has left in its copies."""
        for name, places in self._places.items():
            for key, live in self._live(name):
                left = copies[name][key].detach()
                if (live.shape, live.dtype) == (left.shape, left.dtype):
                    live.detach().copy_(left)
                else:
                    part, own = places[key]
                    part._buffers[own] = left.clone()

    @contextmanager
    def as_left(self, copies: Mapping[str, Buffers]) -> Iterator[None]:
        """Within, the buffers hold what is in these copies. Raises ExecutionError where it has been written to."""
        pairs = [(name, key, live, live.data) for name in self._places for key, live in self._live(name)]
        versions = [live._version for _, _, live, _ in pairs]
        for name, key, live, _ in pairs:
            live.data = copies[name][key].detach()
        try:
            yield
        finally:
            for _, _, live, data in pairs:
                live.data = data
        for (name, key, live, _), version in zip(pairs, versions, strict=True):
            if live._version != version:
                raise ExecutionError(
                    f"a buffer is written to by forwards, or by backwards, whose order the schedule chooses; buffer "
                    f"{key!r} of layer {name!r} is written to by both; let the backward write to one of its own"
                )

    def _live(self, name: str) -> Iterator[tuple[str, Tensor]]:
        for key, (part, own) in self._places[name].items():
            live = part._buffers[own]
            if live is not None:
                yield key, live


def _names(layer: str, key: str) -> set[str]:
    """What a buffer of a layer may be called in the model: also of the layer that is the model, or the code between."""
    return {f"{layer}.{key}", key.replace("/", ".")}
