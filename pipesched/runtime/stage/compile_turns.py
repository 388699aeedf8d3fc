"""Compile turns: while torch compiles in one thread, no other thread of the process runs code between layers.

``torch.compiler.is_compiling()`` is a flag of the whole process. Code between layers that reads it, such as that of
transformers' attention masks, would take the branch for compiled code while another rank's thread compiles a layer.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from threading import Condition

__all__ = ["CompileTurns"]


class CompileTurns:
    """Lets forwards that torch has compiled run together, and a forward that it may compile run alone."""

    #: The forwards of all pipelines of this process.
    _changed = Condition()
    _running = 0
    _alone = False

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    @contextmanager
    def turn(self, key: Hashable) -> Iterator[None]:
        """Wait for the turn of a forward. ``key`` has all that torch compiles for, such as the shapes of the inputs."""
        alone = key not in self._known
        self._begin(alone=alone)
        try:
            yield
            self._known.add(key)
        finally:
            self._end(alone=alone)

    def _begin(self, *, alone: bool) -> None:
        turns = CompileTurns
        with turns._changed:
            turns._changed.wait_for(lambda: not turns._alone)
            if alone:
                turns._alone = True
                turns._changed.wait_for(lambda: not turns._running)
            else:
                turns._running += 1

    def _end(self, *, alone: bool) -> None:
        turns = CompileTurns
        with turns._changed:
            if alone:
                turns._alone = False
            else:
                turns._running -= 1
            turns._changed.notify_all()
