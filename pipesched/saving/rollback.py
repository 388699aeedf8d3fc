"""Rollback: remembers the states of objects before a checkpoint is loaded into them, to restore them after an error."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor

from pipesched.saving.together import StuckError
from pipesched.tensors.payload import pytree

__all__ = ["Rollback", "noted"]


class Rollback:
    """A context that restores objects if it is left with an error, except a StuckError: the work may still go on."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> "Rollback":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, StuckError):
            self._stack.close()

    def remember(self, state: Callable[[], Any], load: Callable[[Any], Any]) -> None:
        """Call ``load`` with a copy of what ``state()`` returns now, if the context is left with an error.

        An object whose state cannot be read or copied is not restored. Tensors are copied to host memory.
        """
        try:
            before = copy.deepcopy(pytree.tree_map_only(Tensor, _copied, state()))
        except Exception:  # user code can raise anything; loading the checkpoint may still work
            return
        self.then(load, before)

    def then(self, call: Callable[..., Any], *args: Any) -> None:
        """Call ``call(*args)`` if the context is left with an error. The last call is made first.

        Errors of the call are ignored, because the first error is more important.
        """

        def attempt() -> None:
            with suppress(Exception):
                call(*args)

        self._stack.callback(attempt)


@contextmanager
def noted(name: str) -> Iterator[None]:
    """A context that loads a state into an object of the user. A note says which one, if this raises an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while {name} was loading its state from a checkpoint")
        raise


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
