"""Targets: the Python objects that arguments of the form file.py:name or module:name stand for."""

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from pipesched.errors import PipeschedError

__all__ = ["imported", "is_target"]


def is_target(text: str) -> bool:
    """Whether an argument stands for a Python object, rather than for a name or another kind of file."""
    return ":" in text or text.endswith(".py")


def imported(target: str, rule: str, example: str, error: type[PipeschedError]) -> Any:
    """Import a file or a module, and return the object with the target's name.

    Args:
        target: file.py:name or module:name. The import path includes the current folder.
        rule: what the argument must be, the first part of a message.
        example: a function as an example for a target without a name, such as "make, where make() returns a model".
        error: the class of the error to raise.

    Raises:
        PipeschedError: the target has no name, cannot be imported, or the module has no such object. An error that the
            module itself raises keeps its class and its traceback.

    """
    place, _, name = target.rpartition(":")
    if target.endswith((".py", ".py:")):
        raise error(f"{rule}; {target!r} names no function; for example, pass {target.removesuffix(':')}:{example}")
    try:
        module = _module(place)
    except (ImportError, OSError, SyntaxError, ValueError) as problem:
        reason = problem if place else "it names no function"
        raise error(f"{rule}; {target!r} cannot be imported ({reason}); correct the path or the name") from problem
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), 1, 0.5)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        missing = f"module {module.__name__!r} has no attribute {name!r}"
        raise error(f"{rule}; {target!r} cannot be imported ({missing}); correct the path or the name{hint}")
    return getattr(module, name)


def _module(place: str) -> Any:
    """Import a Python file, or a module by name. The import path includes the current folder."""
    if not place.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(place)
    path = Path(place).resolve()
    sys.path.insert(0, str(path.parent))  # as Python does for scripts
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    known = sys.modules.setdefault(path.stem, module)  # dataclasses look up the module of their annotations
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if known is module:
            del sys.modules[path.stem]
        raise
    return module
