"""Torch functions: identifies functions that read values, change tensors in place, or compute gradients."""

from collections.abc import Callable, Sequence
from inspect import currentframe
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from pipesched.tensors.payload import pytree
from pipesched.tensors.tree_structure import tensors_in

__all__ = [
    "ASKS",
    "DIFFERENTIATES",
    "LOSSES",
    "MAKE_DUAL",
    "READS",
    "changed_in_place",
    "is_dispatched",
    "is_shaped_by_contents",
    "memory_at",
    "name_of",
    "only_looked_at",
    "version_of",
]

READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__int__", "__float__", "__index__"}
READS |= {"__complex__", "__contains__", "__array__", "__format__", "__repr__"}  # values as plain Python objects
_LIKE_FIRST = {"new_ones", "new_zeros", "new_full", "new_tensor", "zeros_like", "ones_like", "full_like"}
_LIKE_SECOND = {"expand_as", "view_as", "reshape_as", "type_as"}
_SHAPED = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"}
#: Queries that cannot be answered for a tensor that is in another stage.
ASKS = {"is_contiguous", "stride", "storage_offset", "torch.Tensor.requires_grad.__get__"}
#: Functions that compute gradients, which a forward may call.
DIFFERENTIATES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
#: Functions of pipesched that reduce over rows as torch's loss functions do, by arguments of the same names.
LOSSES: set[Callable[..., Tensor]] = set()
#: The function that begins forward-mode differentiation, which ``torch.func.jvp`` uses, too.
MAKE_DUAL = "_make_dual"
_OPERATOR = type(torch.ops.aten.add.Tensor)


def is_dispatched(function: Callable[..., Any]) -> bool:
    """Return whether a dispatch mode is calling this operator. The user's code called another function.

    This happens inside functions that function modes do not see, such as ``torch.from_numpy``.
    """
    if not isinstance(function, _OPERATOR):
        return False
    frame = currentframe()
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    return frame is not None


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or the full name of a property, such as ``torch.Tensor.device.__get__``."""
    name = getattr(function, "__name__", "")
    return (resolve_name(function) or name) if name in ("__get__", "") else name


def is_shaped_by_contents(name: str, args: Sequence[Any]) -> bool:
    """Return whether the shape of a function's result depends on the values of tensors."""
    if name == "__getitem__":
        index = list(args[1:])
        in_slices = any(
            isinstance(leaf, slice) and any(True for _ in tensors_in(leaf)) for leaf in pytree.tree_leaves(index)
        )
        return in_slices or any(tensor.dtype is torch.bool for tensor in tensors_in(index))
    return name in _SHAPED or (name == "where" and len(args) == 1)


def only_looked_at(name: str, args: Sequence[Any]) -> int | None:
    """Return the position of the argument that a function such as ``new_ones`` only asks for shape, dtype and device.

    Returns None if there is no such argument.
    """
    place = 0 if name in _LIKE_FIRST else 1 if name in _LIKE_SECOND else len(args)
    return place if place < len(args) and isinstance(args[place], Tensor) else None


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor; 0 for an inference tensor, which has no count."""
    return 0 if tensor.is_inference() else tensor._version


def changed_in_place(tensors: list[Tensor], versions: list[int]) -> list[int]:
    """Return the positions of the tensors that were changed in place since their ``versions`` were read."""
    return [
        position
        for position, (tensor, version) in enumerate(zip(tensors, versions, strict=True))
        if version_of(tensor) != version
    ]


def memory_at(tensor: Tensor) -> int:
    """Return a key that is the same for tensors that share memory."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr() or id(storage)
    except (NotImplementedError, RuntimeError):  # functional wrappers, such as those inside vmap, have no memory
        return id(tensor)
