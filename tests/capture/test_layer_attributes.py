"""Code between layers reads attributes of layers: the values of now, whichever stage runs the layer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.errors import GraphError

X, Y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.linspace(1, -1, 64).reshape(8, 8)
mse = functional.mse_loss


class Net(nn.Module):
    """Its code reads an attribute of the first block after each block."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        first: Any = self.blocks[0]
        first.gain, first.mode, first.flag = 1.0, "tanh", False
        self._read = read

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._read(self.blocks[0], block(x))
        return x


def branches_on_training(first: Any, x: Tensor) -> Tensor:
    return x.tanh() if first.training else x.sigmoid()


def branches_on_mode(first: Any, x: Tensor) -> Tensor:
    return getattr(torch, first.mode)(x)  # type: ignore[no-any-return]


READS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a number": lambda first, x: x * first.gain,
    "a number, by getattr": lambda first, x: x * getattr(first, "gain", 5.0),
    "a number that decides": lambda first, x: x.tanh() if first.gain > 2 else x.sigmoid(),
    "a flag": lambda first, x: x.abs() if first.flag else x,
    "a string": branches_on_mode,
    "training": branches_on_training,
    "training as an argument": lambda first, x: functional.dropout(x, 1.0, first.training) + x,
}


def change(first: Any) -> None:
    first.gain, first.mode, first.flag = 3.0, "sin", True
    first.eval()


def check(pipe: Pipeline, model: nn.Module) -> None:
    """Compare a step and an evaluation with a plain loop over the same four micro-batches."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    model.zero_grad()
    total = torch.zeros(())
    for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
        loss = mse(plain(x), y) / 4
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(pipe.step(X, target=Y), total)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    torch.testing.assert_close(pipe.evaluate(X, target=Y), total)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b"])
def test_an_attribute_of_a_layer_has_the_value_of_now(name: str, schedule: str) -> None:
    model = Net(READS[name])
    given: dict[str, Any] = {"loss_fn": mse, "devices": ["cpu"] * 2, "num_microbatches": 4, "schedule": schedule}
    with Pipeline(model, X[:2], **given) as pipe:
        check(pipe, model)
        change(model.blocks[0])
        check(pipe, model)
        model.blocks[0].gain = 0.5  # type: ignore[assignment]
        model.blocks[0].mode = "cos"  # type: ignore[assignment]
        check(pipe, model)


class Counts(nn.Linear):
    """A layer whose forward stores plain values on the layer."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls = 0
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows = len(x)
        return super().forward(x)


@pytest.mark.parametrize(
    "read", [lambda first, x: x * first.calls, lambda first, x: x / max(first.rows, 1)], ids=["calls", "rows"]
)
def test_an_attribute_that_a_forward_changes_is_refused_unless_there_is_one_stage(
    read: Callable[[Any, Tensor], Tensor],
) -> None:
    def model() -> Net:
        net = Net(read)
        net.blocks[0] = Counts()
        return net

    given: dict[str, Any] = {"loss_fn": mse, "num_microbatches": 4, "schedule": "1f1b"}
    with Pipeline(model(), X[:1], devices=["cpu"] * 2, **given) as pipe:  # noqa: SIM117
        with pytest.raises(GraphError, match=r"the forward of layer 'blocks\.0' changes its attribute '(calls|rows)'"):
            pipe.step(X, target=Y)
    ours, plain = model(), model()
    due = sum(mse(plain(x), y).detach() / 4 for x, y in zip(X.chunk(4), Y.chunk(4), strict=True))
    with Pipeline(ours, X[:1], devices=["cpu"], **given) as pipe:
        torch.testing.assert_close(pipe.step(X, target=Y), due)
