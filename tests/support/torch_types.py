"""Torch types: tests that check types need a torch whose public names are declared."""

import pytest
from torch.torch_version import TorchVersion, __version__

__all__ = ["needs_torch_types"]

needs_torch_types = pytest.mark.skipif(
    TorchVersion(__version__) < "2.13", reason="torch.amp of this torch does not declare GradScaler, which mypy reports"
)
