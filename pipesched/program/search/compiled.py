"""Compilation of the search's inner loops with numba, if numba is installed. The results are the same without it.

The compiled functions use only integers below 2**63, and sequences that are read and written by index. Without
numba, these sequences are lists, because lists are faster than arrays in plain Python.

The compilation takes about as long as a long search in plain Python. So the functions are compiled only once searches
have taken long enough to repay it, or if the machine code is already on the disk.
"""

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, MutableSequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipesched.errors import PipeschedError
from pipesched.progress import progress_here

__all__ = ["MACHINE_CODE", "MachineCode", "Whole", "compiled", "whole"]

#: A sequence of whole numbers: a list, or an array if the functions are compiled.
Whole = MutableSequence[int]

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_REPAID_S = 40.0  # the seconds of searches in plain Python that repay the compilation


class MachineCode:
    """The machine code of the decorated functions, and the decision whether searches use it."""

    def __init__(self) -> None:
        #: Whether the functions are compiled now.
        self.is_used = False
        self._may_be_used = find_spec("numba") is not None
        self._functions: list[Callable[..., Any]] = []
        self._machine: dict[Any, Any] = {}  # plain function -> numba's function
        self._spent_s = 0.0
        self._lock = threading.RLock()

    def add(self, function: Callable[..., Any]) -> None:
        """Add a function. Functions that it calls must have been added before."""
        self._functions.append(function)

    def run(self, search: Callable[[], T], expected_s: float) -> T:
        """Return the result of ``search()``, which runs with machine code if that is worth while.

        If the machine code cannot be made, for example because the disk is full, runs ``search`` without it.

        Args:
            search: the search. It must make its own sequences with `whole`.
            expected_s: how long the search will probably take without machine code, in seconds.

        """
        # Searches have limits. Sequences that are made with and without machine code do not mix.
        with progress_here().bounded(), self._lock:
            if self._pays(expected_s):
                self._use(True)
            begin_s = time.perf_counter()
            try:
                return search()
            except PipeschedError:
                raise
            except Exception:
                if not self.is_used:
                    raise
                self._may_be_used = False
                self._use(False)
                return search()
            finally:
                self._spent_s += time.perf_counter() - begin_s

    def _pays(self, expected_s: float) -> bool:
        if self.is_used or not self._may_be_used:
            return False
        return self._spent_s + expected_s > _REPAID_S or self._is_on_disk()

    def _is_on_disk(self) -> bool:
        """Return whether the machine code of the functions that take longest to compile is on the disk, and current."""
        for function in self._functions:
            source = Path(function.__code__.co_filename)
            name = f"{source.stem}.{function.__qualname__}"
            if name not in _LONG:
                continue
            place = self._compiled(function).stats.cache_path
            names = f"{name}-*.nbi"
            if place is None or not any(
                index.stat().st_mtime > source.stat().st_mtime for index in Path(place).glob(names)
            ):
                return False
        return True

    def _compiled(self, function: Callable[..., Any]) -> Any:
        """Return numba's version of a function, which is compiled when it is first called."""
        if function not in self._machine:
            njit = importlib.import_module("numba").njit
            options = {"inline": "always", "_nrt": False}
            try:
                self._machine[function] = njit(cache=True, **options)(function)
            except RuntimeError:  # no folder for the cache is writable, as in many containers
                self._machine[function] = njit(**options)(function)
        return self._machine[function]

    def _use(self, used: bool) -> None:
        """Replace the functions by their machine code in all modules of the search, or the other way round."""
        pairs = [(function, self._compiled(function)) for function in self._functions]
        new = {id(plain): machine for plain, machine in pairs} if used else {id(two): one for one, two in pairs}
        package = __name__.rpartition(".")[0]
        for module in [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]:
            for name, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, name, new[id(value)])
        self.is_used = used


#: The functions that nearly every search calls, and that take longest to compile.
_LONG = ("annealing._anneal", "list_orders.write")
#: The machine code of this process.
MACHINE_CODE = MachineCode()


def compiled(function: Function) -> Function:
    """Decorator: allows a function to be compiled, with machine code that is cached on disk.

    Compiled functions are inlined into the compiled functions that call them, because passing many arrays in a tuple
    takes longer than most of these functions.

    The function must not create arrays, or views of arrays such as slices, so that numba does not have to count
    references to arrays. Counting would make functions with many arrays in a tuple ten times slower.
    """
    MACHINE_CODE.add(function)
    return function


def whole(numbers: Iterable[int]) -> Whole:
    """Return integers as a sequence for compiled functions."""
    found: Any = np.array(list(numbers), np.int64) if MACHINE_CODE.is_used else list(numbers)
    return found  # type: ignore[no-any-return]
