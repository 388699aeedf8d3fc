"""A recomputation gets copies of inputs with the strides of the inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Numerics, Pipeline
from pipesched.tensors.strided_clone import strided_clone
from pipesched.testing import reference_step

BASE = torch.arange(48.0).reshape(4, 6, 2)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE[:, 1:3],
        BASE.transpose(0, 2)[:, ::2],
        BASE[:1].expand(3, 6, 2),
        BASE[:, :, :1].expand(4, 6, 5),
        BASE[0, 0, 0],
        BASE[:0],
        torch.ones(1).expand(4, 3),
    ],
)
def test_a_copy_has_the_values_and_strides(tensor: Tensor) -> None:
    copy = strided_clone(tensor)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()


def test_a_copy_can_be_differentiated() -> None:
    own = BASE.clone().requires_grad_()
    strided_clone(own[:, 1:3]).sum().backward()
    assert own.grad is not None
    assert float(own.grad.sum()) == 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


@pytest.mark.parametrize(
    "checkpoint", ["always", {"0": "recompute"}, {"0": "recompute-cheap"}, {"1": "recompute-cheap"}]
)
def test_rows_in_the_second_dimension_are_recomputed_with_the_same_bits(checkpoint: Any) -> None:
    torch.manual_seed(0)
    model, plain = (nn.Sequential(*(Block() for _ in range(4))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(5, 8, 8), torch.randn(5, 8, 8)
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "seed": 1}
    numerics = Numerics(split_dims=1)
    with Pipeline(
        model, x[:, :2], devices=["cpu"] * 2, schedule="1f1b", checkpoint=checkpoint, numerics=numerics, **options
    ) as pipe:
        loss = pipe.step(x, target=y)
    assert torch.equal(loss, reference_step(plain, x, target=y, split_dims=1, **options))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
