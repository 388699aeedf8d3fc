"""Pending tensor: a tensor that is still on its way. Whoever looks at it waits; whoever does not, need not."""

import threading
from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor

from pipesched.tensors.payload import pytree

__all__ = ["pending"]


def pending(take: Callable[[], Tensor]) -> Tensor:
    """A tensor that its first use turns into what ``take`` returns, a plain torch.Tensor; raises what that raises.

    Any operation, attribute, conversion or collective is a use. ``torch.tensor`` alone, which asks no subclass, copies
    nan before the first one.
    """
    with torch.inference_mode(False):
        tensor = torch.tensor(nan).as_subclass(_Pending)
    tensor._awaited = take, threading.Lock()
    return tensor


class _Pending(Tensor):
    """It becomes its value in place, and a plain tensor, as torch's own uninitialised parameters do."""

    _awaited: tuple[Callable[[], Tensor], threading.Lock]

    def _arrive(self) -> None:
        take, lock = self._awaited
        with lock, torch.inference_mode(False):
            if type(self) is _Pending:  # another thread may have been first
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
