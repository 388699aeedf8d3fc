"""A warning that points at the user's line of code."""

import sys
import warnings

__all__ = ["warn"]

_BETWEEN = {"pipesched", "torch", "functools", "contextlib", "click"}  # packages whose frames are not the user's


def warn(text: str) -> None:
    """Warn of something at the line from which pipesched was called, however deep in it this is."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level = level + 1
        frame = frame.f_back
    warnings.warn(text, stacklevel=level)
