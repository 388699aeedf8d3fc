"""Function transforms: recognises the code that runs inside ``torch.vmap``, ``torch.func.grad`` and similar functions.

Tensors inside such code are wrappers without memory, and no public hook sees where the code begins and ends. But every
torch function that it calls has the transform's frame below it on the Python stack.
"""

import types
from collections.abc import Callable, Collection, Iterator
from inspect import currentframe, getargvalues
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pipesched.tensors.tree_structure import tensors_in

__all__ = [
    "RETURNS_A_FUNCTION",
    "arguments_of",
    "batches_gradients",
    "call_of",
    "running_transform",
    "tensors_of",
    "title",
]

_MODULES = {function.__globals__["__name__"] for function in (torch.func.vmap, torch.func.jvp)}
#: The module of the loop over batched gradients in ``torch.autograd.grad``.
_MODULES_OF_BATCHES = {"torch._vmap_internals"}
#: Transforms that return a function of the inner tensors, which code can call later.
RETURNS_A_FUNCTION = {torch.func.vjp.__name__, torch.func.linearize.__name__}


def running_transform() -> FrameType | None:
    """Return the frame of the outermost function transform that the caller's code runs in, or None."""
    return _outermost(_MODULES)


def batches_gradients() -> bool:
    """Return whether the caller's code runs in ``torch.autograd.grad`` with ``is_grads_batched=True``."""
    return _outermost(_MODULES_OF_BATCHES) is not None


def _outermost(modules: Collection[str]) -> FrameType | None:
    found = None
    frame = currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in modules:
            found = frame
        frame = frame.f_back
    return found


def title(frame: FrameType) -> str:
    """Return the name of a transform, such as "vmap"."""
    return frame.f_code.co_qualname.partition(".")[0]


def arguments_of(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments (args, kwargs) with which a transform was called."""
    names, more, keywords, values = getargvalues(frame)
    count = frame.f_code.co_argcount
    args = [values[name] for name in names[:count]]
    kwargs = {name: values[name] for name in names[count:]}
    return (*args, *(values[more] if more else ())), {**kwargs, **(values[keywords] if keywords else {})}


def tensors_of(frame: FrameType) -> Iterator[Tensor]:
    """Iterate over the tensors among the arguments of a transform."""
    return tensors_in(arguments_of(frame))


def call_of(frame: FrameType) -> Callable[..., Any]:
    """Return a function that runs a transform again, if it is called with the same arguments."""
    code = frame.f_code
    cells = tuple(types.CellType(frame.f_locals[name]) for name in code.co_freevars)
    return types.FunctionType(code, frame.f_globals, code.co_name, None, cells or None)
