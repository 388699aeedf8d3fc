"""Pending tensor: a tensor whose value has not arrived yet. The first use blocks until the value arrives."""

import threading
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor

from pipesched.tensors.payload import pytree

__all__ = ["pending"]


def pending(take: Callable[[], Tensor]) -> Tensor:
    """Return a tensor that gets its value from ``take`` on first use and then becomes a plain torch.Tensor.

    Any operation, attribute access, conversion or collective counts as a use, except ``torch.tensor(pending)``. That
    call bypasses the methods of subclasses, so before the first use, the call copies NaN. If ``take`` raises an error,
    the use raises the same error.
    """
    with torch.inference_mode(False):
        tensor = torch.tensor(nan, device="cpu").as_subclass(_PendingTensor)
    tensor._awaited = take, threading.Lock()
    return tensor


class _PendingTensor(Tensor):
    """A tensor that becomes a plain tensor in place, as torch's own uninitialised parameters do."""

    _awaited: tuple[Callable[[], Tensor], threading.Lock]

    def _arrive(self) -> None:
        take, lock = self._awaited
        with lock, torch.inference_mode(False):
            if type(self) is _PendingTensor:  # another thread may have received the value
                value = take()
                self.__class__ = Tensor  # type: ignore[assignment]
                self.data = value
                del self._awaited

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if type(leaf) is cls:
                leaf._arrive()
        return func(*args, **(kwargs or {}))
