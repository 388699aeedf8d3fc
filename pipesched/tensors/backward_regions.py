"""Backward regions: finds running code whose backward is one unit, and so cannot be split between stages."""

from collections.abc import Callable, Iterator
from inspect import currentframe
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch.autograd import Function
from torch.utils import checkpoint

__all__ = ["Region", "RegionFinder"]


class Region(NamedTuple):
    """A running call whose backward is one unit.

    Attributes:
        frame: the frame of the call.
        of_function: whether the call is the forward of a ``torch.autograd.Function``. Otherwise, it is one of
            ``torch.utils.checkpoint``.

    """

    frame: FrameType
    of_function: bool


class RegionFinder:
    """Finds the region that is running, by the forwards of all Functions.

    Which frame calls a forward differs between versions of torch.
    """

    def __init__(self) -> None:
        self._forwards: dict[CodeType, list[Callable[..., Any]]] = {}
        self._known: dict[type[Function], Callable[..., Any]] = {}  # the forward of each class when it was collected
        self._seen: set[CodeType] = set()  # code that ran when the forwards were collected, or earlier
        self._num_kinds = 0

    def outermost(self) -> Region | None:
        """Return the outermost running call of torch.utils.checkpoint or an autograd.Function's forward, or None."""
        frames = []
        frame = currentframe()
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        self._update({frame.f_code for frame in frames})
        for frame in reversed(frames):
            if any(_runs(frame, function) for function in self._forwards.get(frame.f_code, ())):
                return Region(frame, True)
            if _is_checkpoint(frame):
                return Region(frame, False)
        return None

    def _update(self, running: set[CodeType]) -> None:
        """Collect the forwards if other code runs than before, or if there are other classes than before."""
        num_kinds = len(Function.__subclasses__())
        if running <= self._seen and num_kinds == self._num_kinds:
            return
        self._seen |= running
        self._num_kinds = num_kinds
        for kind in _kinds(Function):
            forward = getattr(kind.forward, "__func__", kind.forward)
            if self._known.get(kind) is not forward:
                self._known[kind] = forward
                for function in _unwrapped(forward):
                    self._forwards.setdefault(function.__code__, []).append(function)


def _is_checkpoint(frame: FrameType) -> bool:
    """Return whether a frame belongs to a call of ``torch.utils.checkpoint.checkpoint``.

    The frames of ``checkpoint_sequential`` do not count, because it calls its last segment without recomputation. For
    the other segments it calls ``checkpoint``.
    """
    is_torchs = frame.f_globals.get("__name__") == checkpoint.__name__
    return is_torchs and not frame.f_code.co_qualname.startswith(checkpoint.checkpoint_sequential.__qualname__)


def _kinds(kind: type[Function]) -> Iterator[type[Function]]:
    for own in kind.__subclasses__():
        yield own
        yield from _kinds(own)


def _unwrapped(function: Any) -> Iterator[Any]:
    """Yield the Python function behind a callable and the functions that it wraps, the outermost first.

    Code that a decorator wraps without ``functools.wraps`` is found by the decorator's own function.
    """
    while function is not None:
        if not hasattr(function, "__code__") and not hasattr(function, "func"):
            function = getattr(type(function), "__call__", None)  # noqa: B004  # the function, not whether there is one
        if hasattr(function, "__code__"):
            yield getattr(function, "__func__", function)
        function = getattr(function, "__wrapped__", getattr(function, "func", None))


def _runs(frame: FrameType, function: Any) -> bool:
    """Return whether a frame with the function's code runs this function.

    Functions that one decorator returns have the same code; their closures are different.
    """
    names = function.__code__.co_freevars
    if not names:
        return True
    values = frame.f_locals
    return all(
        values.get(name) is cell.cell_contents
        for name, cell in zip(names, function.__closure__, strict=True)
        if name in values
    )
