"""Torch types: tests of type checks need the torch with which `make check` runs, because others declare other types."""

from pathlib import Path

import pytest
import torch

__all__ = ["needs_torch_types"]

ROOT = Path(__file__).parents[2]
PINNED = next(
    line.removeprefix("torch==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("torch==")
)

needs_torch_types = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != PINNED, reason=f"types are checked with torch {PINNED}, as in make check"
)
