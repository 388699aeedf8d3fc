"""Lone layers: refuses to run layers in one process alone if they wait for other processes.

Layers that the user has split over ranks call collectives of torch.distributed. One process that measures such layers
would wait for processes that do not run them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipesched.errors import InputError
from pipesched.tensors.torch_insides import DispatchMode

__all__ = ["without_collectives"]

#: The operators of torch.distributed, and those of its functional collectives.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class _Refusing:
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES:
            raise _refusal(f"a layer called the collective {func.overloadpacket.__name__!r} of torch.distributed")
        return func(*args, **(kwargs or {}))


class _Refusal(_Refusing, DispatchMode):
    pass


def _refusal(found: str) -> InputError:
    return InputError(
        f"layers are measured by rank 0 alone, so they must not wait for other processes; {found}; pass schedule= and "
        f"boundaries= (or search=Search(profile=...)), so that no layer is measured, or let pipesched split the layers "
        f"with distributed=Distributed(tensor_parallel=...)"
    )


@contextmanager
def without_collectives(model: nn.Module) -> Iterator[None]:
    """A context in which a collective of torch.distributed raises InputError instead of waiting.

    Raises InputError if a weight of the model is divided among processes, because its layer calls collectives.
    """
    for name, parameter in model.named_parameters():
        if getattr(parameter, "device_mesh", None) is not None:
            raise _refusal(f"the weight {name!r} is a DTensor, which is divided among processes")
    with _Refusal():
        yield
