"""Lone layers: refuses to run layers in one process alone if they wait for other processes.

Layers that the user has split over ranks call collectives of torch.distributed. One process that measures such layers
would wait for processes that do not run them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipesched.errors import InputError
from pipesched.tensors.torch_insides import DispatchMode

__all__ = ["without_collectives"]

#: The operators of torch.distributed, and those of its functional collectives.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class _Refusing:
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES:
            raise InputError(
                f"layers are measured by rank 0 alone, so they must not wait for other processes; a layer called the "
                f"collective {func.overloadpacket.__name__!r} of torch.distributed; pass schedule= and boundaries= (or "
                f"search=Search(profile=...)), so that no layer is measured, or let pipesched split the layers with "
                f"distributed=Distributed(tensor_parallel=...)"
            )
        return func(*args, **(kwargs or {}))


class _Refusal(_Refusing, DispatchMode):
    pass


@contextmanager
def without_collectives() -> Iterator[None]:
    """A context in which a collective of torch.distributed raises InputError instead of waiting."""
    with _Refusal():
        yield
