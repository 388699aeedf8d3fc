"""Compilation of the search's inner loops with numba, if numba is installed. The results are the same without it.

The compiled functions use only integers below 2**63, and sequences that are read and written by index. Without
numba, these sequences are lists, because lists are faster than arrays in plain Python.
"""

import importlib
from collections.abc import Callable, Iterable, MutableSequence
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np

__all__ = ["COMPILES", "Whole", "compiled", "whole"]

#: A sequence of whole numbers: a list, or an array if the functions are compiled.
Whole = MutableSequence[int]

Function = TypeVar("Function", bound=Callable[..., Any])

#: Whether numba is installed, so that the inner loops run as machine code.
COMPILES = find_spec("numba") is not None


def compiled(function: Function) -> Function:
    """Decorator: compiles a function at its first call if numba is installed, and caches the machine code on disk.

    Compiled functions are inlined into the compiled functions that call them, because passing many arrays in a tuple
    takes longer than most of these functions.

    The function must not create arrays, or views of arrays such as slices, so that numba does not have to count
    references to arrays. Counting would make functions with many arrays in a tuple ten times slower.
    """
    if not COMPILES:
        return function
    return importlib.import_module("numba").njit(cache=True, inline="always", _nrt=False)(function)  # type: ignore[no-any-return]


def whole(numbers: Iterable[int]) -> Whole:
    """Return integers as a sequence for compiled functions."""
    found: Any = np.array(list(numbers), np.int64) if COMPILES else list(numbers)
    return found  # type: ignore[no-any-return]
