"""Meta tensors: code that runs them with other tensors, and moves them to devices."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipesched.tensors.meta_tensors import Beside, put_away, put_on


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


def test_layers_go_to_the_meta_device_and_return_but_weights_in_weak_references_keep_their_values() -> None:
    layer = nn.GRU(4, 4)
    before, known = [*layer.parameters()], weakref.ref(layer.bias_ih_l0)
    kept = layer.bias_ih_l0.detach().clone()
    layer(torch.ones(1, 4))[0].sum().backward()
    put_away(layer, dict.fromkeys(layer.parameters(), torch.device("meta")))
    assert all(parameter.is_meta == (parameter is not known()) for parameter in layer.parameters())
    assert all(parameter.grad is None for parameter in layer.parameters())
    put_on(layer, torch.device("cpu"))
    assert all(one is other for one, other in zip(layer.parameters(), before, strict=True))
    assert torch.equal(layer.bias_ih_l0, kept)
    assert torch.equal(layer(torch.zeros(1, 4))[0].isfinite(), torch.ones(1, 4, dtype=torch.bool))
