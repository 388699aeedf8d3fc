"""Buffer copies: copies the buffers that forwards write to, so that each backward uses the values of its own forward.

Several micro-batches are in flight, and autograd saves buffers that the next forward would overwrite. Therefore each
forward writes to new copies of the buffers, and autograd saves these copies. After the forward, the copies' values are
written back to the buffers.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipesched.errors import ExecutionError
from pipesched.tensors.tensor_attributes import with_attributes_of
from pipesched.tensors.torch_functions import version_of

__all__ = ["BufferCopies", "Buffers", "RunningStatistics", "buffers_of", "own_buffers"]

#: The buffers of one layer, keyed by name.
Buffers = dict[str, Tensor]


def own_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, owning module, name in that module) for each buffer, except buffers of torch's own layers.

    Buffers of torch's own layers, such as running statistics, are left out because autograd never reads them after they
    have changed.
    """
    for prefix, part in module.named_modules():
        scripted = isinstance(part, torch.jit.ScriptModule)  # a ScriptModule accepts no replacement tensors
        if not scripted and not str(type(part).forward.__module__).startswith("torch.nn."):
            for key, buffer in part.named_buffers(recurse=False):
                if buffer is not None:
                    yield f"{prefix}.{key}".removeprefix("."), part, key


def buffers_of(modules: Mapping[str, nn.Module]) -> dict[str, Buffers]:
    """Clone all buffers of the modules; return the clones, keyed by module and by buffer name."""
    return _cloned({name: module.named_buffers() for name, module in modules.items()})


def _cloned(buffers: Mapping[str, Iterable[tuple[str, Tensor]]]) -> dict[str, Buffers]:
    """Clone buffers. A buffer that several modules share is cloned once, and its clone is shared, too."""
    clones: dict[Tensor, Tensor] = {}

    def clone(buffer: Tensor) -> Tensor:
        if buffer not in clones:
            clones[buffer] = with_attributes_of(buffer, buffer.clone())
        return clones[buffer]

    return {name: {key: clone(one) for key, one in own} for name, own in buffers.items()}


class BufferCopies:
    """Copies of the buffers that one stage's forwards write to.

    Args:
        modules: the stage's modules, keyed by name.
        written: names of the model's buffers that forwards write to.
        statistics_apart: whether running statistics are collected elsewhere, so that forwards do not change them.

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
        """Return copies of all buffers that forwards write to, for the next forward."""
        return _cloned({name: self._live(name) for name in self._places})

    def note(self, name: str, own: Mapping[str, Tensor], copies: Mapping[str, Buffers]) -> None:
        """Store a module's buffers in ``copies`` after a call, which may have replaced a copy with a new tensor."""
        for key in self._places.get(name, ()):
            copies[name][key] = own[key]

    def take_over(self, copies: Mapping[str, Buffers]) -> None:
        """Set the buffers to the values that a forward left in its copies."""
        for name, places in self._places.items():
            for key, live in self._live(name):
                left = copies[name][key].detach()
                if (live.shape, live.dtype) == (left.shape, left.dtype):
                    live.detach().copy_(left)
                else:
                    part, own = places[key]
                    part._buffers[own] = with_attributes_of(live, left.clone())

    @contextmanager
    def as_left(self, copies: Mapping[str, Buffers]) -> Iterator[None]:
        """A context in which the buffers have the values of ``copies``.

        Raises ExecutionError if a buffer was written to within the context.
        """
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
                raise _of_both(name, key, "make the backward write to another buffer")

    def _live(self, name: str) -> Iterator[tuple[str, Tensor]]:
        for key, (part, own) in self._places[name].items():
            live = part._buffers[own]
            if live is not None:
                yield key, live


class RunningStatistics:
    """The running statistics of torch's own layers in one stage, which forwards change. Backwards must not change them.

    Args:
        modules: the stage's modules, keyed by name.

    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        #: The counts of batches. Updates of the statistics themselves increment no version counter.
        self._counts = [
            (name, key, buffer)
            for name, module in modules.items()
            for key, buffer in module.named_buffers()
            if key.rpartition(".")[2] == "num_batches_tracked"
        ]

    def __bool__(self) -> bool:
        return bool(self._counts)

    def kept(self, backward: Callable[[], None]) -> None:
        """Run a backward. Raises ExecutionError if it changes running statistics."""
        before = [version_of(count) for *_, count in self._counts]
        backward()
        for (name, key, count), version in zip(self._counts, before, strict=True):
            if version_of(count) != version:
                raise _of_both(
                    name,
                    key,
                    "name the layers in checkpoint= instead of calling torch.utils.checkpoint, or pass "
                    "numerics=Numerics(batch_norm='mini-batch')",
                )


def _of_both(layer: str, buffer: str, remedy: str) -> ExecutionError:
    return ExecutionError(
        f"a forward and a backward must not write to the same buffer, because the result would depend on the schedule; "
        f"both write to buffer {buffer!r} of layer {layer!r}; {remedy}"
    )


def _names(layer: str, key: str) -> set[str]:
    """Return the names that a layer's buffer may have in the model.

    ``key`` is the buffer's name within the layer. If ``layer`` stands for the whole model or for code between layers,
    ``key`` is the buffer's name in the model. For code between layers, that name contains "/" instead of ".".
    """
    return {f"{layer}.{key}", key.replace("/", ".")}
