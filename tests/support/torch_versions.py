"""Torch versions: marks for tests that need certain versions of torch."""

from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

__all__ = ["compiles_in_threads", "needs_torch_types", "runs_neighbours"]

ROOT = Path(__file__).parents[2]
PINNED = next(
    line.removeprefix("torch==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.startswith("torch==")
)

needs_torch_types = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != PINNED, reason=f"types are checked with torch {PINNED}, as in make check"
)
compiles_in_threads = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="the compiler of torch before 2.13 can crash in threads; pipesched refuses it",
)
runs_neighbours = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="before 2.13, torch's own runtime sends a tensor to its own rank if neighbouring stages are on it; gloo "
    "cannot do this",
)
