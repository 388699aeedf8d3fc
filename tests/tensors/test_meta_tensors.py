"""Meta tensors: code that runs them with other tensors, and moves them to devices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pipesched.tensors.meta_tensors import Beside


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.to(0),
        lambda x: x.to(device=0),
        lambda x: x.to("cuda:1"),
        lambda x: x.to(torch.device("cuda")),
        lambda x: x.cuda(),
        lambda x: x.cpu(),
    ],
)
def test_a_meta_tensor_stays_on_the_meta_device(move: Callable[[Tensor], Tensor]) -> None:
    x = torch.empty(3, device="meta")
    with Beside(torch.device("cpu")):
        moved = move(x)
    assert moved.is_meta
    assert moved.dtype == torch.float32


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.to(torch.float64),
        lambda x: x.to(0, torch.float64),
        lambda x: x.to(torch.float64, True),
        lambda x: x.to(torch.ones(2, dtype=torch.float64)),
        lambda x: x.to(tensor=torch.ones(2, dtype=torch.float64)),
    ],
)
def test_a_meta_tensor_changes_its_dtype(convert: Callable[[Tensor], Tensor]) -> None:
    x = torch.empty(3, device="meta")
    with Beside(torch.device("cpu")):
        converted = convert(x)
    assert converted.is_meta
    assert converted.dtype == torch.float64
