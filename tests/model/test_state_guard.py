"""The guard that sets a model's state aside for a measurement: the measured operations run at full speed."""

from typing import Any

import pytest
import torch
from torch import nn

from pipesched.model import state_guard
from pipesched.model.state_guard import set_aside, untouched


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operations that go through a dispatch mode in Python, which slows them down."""
    operations: list[Any] = []
    real = state_guard._TensorCopies.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operations.append(func)
        return real(self, func, types, args, kwargs)

    monkeypatch.setattr(state_guard._TensorCopies, "__torch_dispatch__", dispatch)
    return operations


def test_a_model_set_aside_runs_without_a_dispatch_mode(watched: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    running = model[1].running_mean.clone()
    with set_aside(model):
        model(torch.randn(3, 4)).sum().backward()
        assert model[0].weight.grad is not None
        assert not torch.equal(model[1].running_mean, running)
    assert not watched
    assert model[0].weight.grad is None
    assert torch.equal(model[1].running_mean, running)


def test_an_untouched_model_is_watched(watched: list[Any]) -> None:
    """Here the enclosed code may write to weights, which are too large to copy beforehand."""
    model = nn.Linear(4, 4)
    weight = model.weight.detach().clone()
    with untouched(model, True) as written, torch.no_grad():
        model.weight.add_(1)
    assert watched
    assert torch.equal(model.weight, weight)
    assert any(tensor is model.weight for tensor in written)
