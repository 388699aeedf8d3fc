"""User warning: issues warnings that point at the user's line of code."""

import sys
import warnings

__all__ = ["warn"]

_BETWEEN = {"pipesched", "torch", "functools", "contextlib", "click"}  # frames of these packages are skipped


def warn(text: str) -> None:
    """Issue a UserWarning that points at the line of the user's code that called pipesched."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level = level + 1
        frame = frame.f_back
    warnings.warn(text, stacklevel=level)
