"""Rollback: remembers the states of objects before a checkpoint is loaded into them, to restore them after an error."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from torch import Tensor

from pipesched.errors import CheckpointError
from pipesched.progress import advance
from pipesched.tensors.payload import pytree

__all__ = ["Rollback", "noted"]


class Rollback:
    """Remembers states, and restores them with ``undo``."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []
        self._is_undone = False

    def remember(self, state: Callable[[], Any], load: Callable[[Any], Any]) -> None:
        """Let ``undo`` call ``load`` with a copy of what ``state()`` returns now.

        An object whose state cannot be read is not restored. Tensors are copied to host memory. Parts that cannot be
        copied, such as locks, are kept as they are.
        """
        try:
            before = pytree.tree_map(_copied, state())
        except Exception:  # user code can raise anything; loading the checkpoint may still work
            return
        advance()
        self.then(load, before)

    def then(self, call: Callable[..., Any], *args: Any) -> None:
        """Let ``undo`` call ``call(*args)``. The last call is made first."""
        self._calls.append(partial(call, *args))

    def undo(self) -> None:
        """Make the calls. Their errors are ignored, because the error that led here is more important."""
        self._is_undone = True
        for call in reversed(self._calls):
            with suppress(Exception):
                call()
            advance()

    def check(self) -> None:
        """Undo everything again, and raise CheckpointError, if ``undo`` ran meanwhile in another thread."""
        if self._is_undone:
            self.undo()
            raise CheckpointError("a load that was given up must not go on")


@contextmanager
def noted(name: str) -> Iterator[None]:
    """A context that loads a state into an object of the user. A note says which one, if this raises an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {name} was loading its state from a checkpoint")
        raise


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    try:
        return copy.deepcopy(value)
    except Exception:  # such as a lock
        return value
