"""Warnings point at the user's line, however deep in pipesched they are made."""

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pipesched
from pipesched import Pipeline

X = torch.randn(4, 8)


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))


def makes() -> None:
    Pipeline(normed(), X, devices=["cpu"] * 2, boundaries=[2], schedule="1f1b").close()


def tunes() -> None:
    pipesched.tune(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), X, devices=["cpu"] * 2, batch_size=8)


@pytest.mark.parametrize("call", [makes, tunes])
def test_a_warning_points_at_the_line_that_called(call: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    first = inspect.getsourcelines(call)[1]
    assert [(one.filename, one.lineno) for one in caught] == [(__file__, first + 1)]
