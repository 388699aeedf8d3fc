"""Attributes that code sets on tensors between layers: they arrive with the tensor, or the cut is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.errors import GraphError, InputError, PartitionError
from pipesched.testing import reference_step

X, Y = torch.linspace(-1, 1, 128).reshape(16, 8), torch.linspace(1, -1, 128).reshape(16, 8)
OPTIONS: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4}


class Marks(nn.Linear):
    """Sets a number on the tensor that it returns."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.scale = 3.0  # type: ignore[attr-defined]
        return y


class Reads(nn.Linear):
    """Scales by the number that the tensor carries."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(x, "scale", 1.0)


class InOneRow(nn.Module):
    """The code between layers marks, or a layer does; a layer reads, or the code does."""

    def __init__(self, marks: str, reads: str) -> None:
        super().__init__()
        self.marks, self.reads = marks, reads
        first = Marks(8, 8) if marks == "layer" else nn.Linear(8, 8)
        last = Reads(8, 8) if reads == "layer" else nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), first, last, nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        if self.marks == "code":
            x.scale = float(len(self.layers))  # type: ignore[attr-defined]
        scale: Any = x.scale if self.reads == "code" else 1.0  # type: ignore[attr-defined]
        x = self.layers[2](x) * scale
        return self.layers[4](self.layers[3](x).tanh())


def twins(make: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    return model, plain


@pytest.mark.one_in(2)
@pytest.mark.parametrize("marks", ["layer", "code"])
@pytest.mark.parametrize("reads", ["layer", "code"])
@pytest.mark.parametrize("boundaries", [None, ["layers.1", "layers.3"]])
def test_a_reader_stays_in_the_stage_of_the_tensor(marks: str, reads: str, boundaries: Any) -> None:
    model, plain = twins(lambda: InOneRow(marks, reads))
    with Pipeline(model, X[:4], devices=["cpu"] * 3, schedule="1f1b", boundaries=boundaries, **OPTIONS) as pipe:
        loss = pipe.step(X, target=Y)
    assert torch.equal(loss, reference_step(plain, X, target=Y, **OPTIONS))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_no_stage_begins_between_a_tensor_and_its_reader() -> None:
    with pytest.raises(PartitionError, match=r"got 'layers\.2'"):
        Pipeline(InOneRow("layer", "layer"), X[:4], devices=["cpu"] * 2, boundaries=["layers.2"], **OPTIONS)


def test_a_chain_is_not_cut_behind_a_layer_that_marks_its_output() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), Marks(8, 8), Reads(8, 8), nn.Linear(8, 8))

    with pytest.raises(GraphError, match=r"layer '1', the last of stage 0, sets an attribute.*together="):
        Pipeline(make(), X[:4], devices=["cpu"] * 2, schedule="1f1b", boundaries=[2], **OPTIONS)
    model, plain = twins(make)
    together = [["1", "2"]]
    with Pipeline(model, X[:4], devices=["cpu"] * 2, schedule="1f1b", together=together, **OPTIONS) as pipe:
        assert torch.equal(pipe.step(X, target=Y), reference_step(plain, X, target=Y, **OPTIONS))


def test_tensors_of_a_batch_carry_no_attributes() -> None:
    sample = X[:4].clone()
    sample.scale = 3.0  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"the sample has the attribute 'scale'; pass the value as an argument"):
        Pipeline(nn.Sequential(Reads(8, 8), nn.Linear(8, 8)), sample, devices=["cpu"] * 2, **OPTIONS)
