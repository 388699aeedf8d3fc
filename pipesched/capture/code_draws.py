"""Code draws: the keyed random numbers of the code between layers, for a run of this code outside of the stages."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pipesched.tensors.keyed_random import Key, KeyedRandom, draws, outside_state
from pipesched.tensors.tree_structure import tensors_in

__all__ = ["CodeDraws"]


class CodeDraws:
    """Draws the numbers that the code between layers draws for one micro-batch in every stage.

    Use as a context manager around the code. Calls of layers run in ``paused``.

    Args:
        random: the generator of the random numbers.
        key: the key of the micro-batch.

    """

    def __init__(self, random: KeyedRandom, key: Key) -> None:
        self._random = random
        self._key = key
        self._part = 0
        self._count = 0
        self._seeded: Any = None
        self._code = ExitStack()
        #: Whether the code drew numbers from the generators of Python or numpy.
        self.drew_outside = False

    def __enter__(self) -> "CodeDraws":
        self._part = self._count = 0
        self.drew_outside = False
        self._begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end()

    def _begin(self) -> None:
        self._random.enter(self._key, "")
        self._code.enter_context(self._random.outside("", self._part))
        self._seeded = outside_state()
        self._part += 1

    def _end(self) -> None:
        self.drew_outside |= outside_state() != self._seeded
        self._code.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which a layer runs."""
        self._end()
        try:
            yield
        finally:
            self._begin()

    def call(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function. A random function draws the same numbers as in the stage that calls it."""
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        self._count += 1
        return self.call_at(self._count - 1, func, *args, **kwargs)

    def call_at(self, number: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a random function that follows ``number`` earlier calls of random functions."""
        handler = self._random.handler_for(func)
        if handler is None or any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        self._random.enter(self._key, "", 0, number)
        return handler(func, args, kwargs)
