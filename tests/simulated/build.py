"""The backend, compiled once for each version of torch and of its sources, and kept in the user's cache folder."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

__all__ = ["library", "load", "missing"]

_SOURCES = Path(__file__).parent / "backend"
_NAME = "simulated_backend"
_FLAGS = ("-std=c++20", "-O1", "-g0", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden")
_LIBRARIES = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10")


def missing() -> str | None:
    """Return what the build lacks on this machine, or None."""
    if shutil.which(_compiler()) is None:
        return f"the simulated accelerator needs a C++ compiler; {_compiler()} was not found; install g++, or set CXX"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"the simulated accelerator needs the headers of Python; {header} does not exist; install python3-dev"
    return None


def load() -> ModuleType:
    """Return the compiled backend."""
    spec = importlib.util.spec_from_file_location(_NAME, library())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library() -> Path:
    """Return the file of the backend. The first call on a machine compiles it; other processes wait meanwhile."""
    folder = Path(cpp_extension.get_default_build_root()) / _NAME / _digest()
    made = folder / f"{_NAME}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _compile(made)
    return made


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _digest() -> str:
    """A name for what the library depends on: the sources, the flags, torch, Python and the compiler's name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(_SOURCES.iterdir())]
    key = [*texts, *_FLAGS, torch.__version__, str(torch.__file__), sys.version, _compiler()]
    return hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]


def _compile(made: Path) -> None:
    headers = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    folders = cpp_extension.library_paths()
    half_made = made.with_suffix(f".{os.getpid()}")
    command = [
        _compiler(),
        *_FLAGS,
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        *(part for path in headers for part in ("-isystem", path)),
        str(_SOURCES / "backend.cpp"),
        *(f"-L{path}" for path in folders),
        *_LIBRARIES,
        "-o",
        str(half_made),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated accelerator was not compiled; {' '.join(command)}\n{done.stderr[-4000:]}")
    half_made.replace(made)
