"""Attributes of parameters and buffers are those of the originals wherever other tensors stand in for these."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.testing import reference_step

X, Y = torch.linspace(-1, 1, 128).reshape(16, 8), torch.linspace(1, -1, 128).reshape(16, 8)
mse = functional.mse_loss


class Scaled(nn.Module):
    """A linear layer whose weight has a multiplier, and counts the calls that read it."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3) if weight is None else weight
        self.weight.multiplier = 3.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        self.weight.calls = getattr(self.weight, "calls", 0) + 1  # type: ignore[attr-defined]
        scaled: Tensor = functional.linear(x, self.weight) * getattr(self.weight, "multiplier", 1.0)
        return scaled


class Blocks(nn.Module):
    """Its own code multiplies by a tied weight, and reads the weight's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        weight = self.blocks[0].weight
        return functional.linear(x, weight) * getattr(weight, "multiplier", 1.0)


class WithBuffer(nn.Module):
    """A layer that moves a buffer in each forward, and reads an attribute of the buffer."""

    highest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("highest", torch.ones(()))
        self.highest.decay = 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.highest.mul_(getattr(self.highest, "decay", 1.0)).add_(x.detach().amax())
        made: Tensor = self.linear(x) * self.highest
        return made


def chain() -> nn.Module:
    return nn.Sequential(*(Scaled() for _ in range(4)))


def tied() -> nn.Module:
    first = Scaled()
    return nn.Sequential(first, nn.Linear(8, 8), Scaled(first.weight), nn.Linear(8, 8), Scaled(first.weight))


def with_buffer() -> nn.Module:
    return nn.Sequential(WithBuffer(), nn.Linear(8, 8), WithBuffer())


def built(make: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make()
    return model


def trained(model: nn.Module) -> tuple[float, list[Tensor]]:
    """Return the loss and the gradients of plain gradient accumulation over four micro-batches."""
    total = 0.0
    for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
        loss = mse(model(x), y) / 4
        loss.backward()
        total += loss.item()
    return total, [one.grad for one in model.parameters() if one.grad is not None]


def check(model: nn.Module, loss: Tensor, make: Any) -> None:
    due, grads = trained(built(make))
    torch.testing.assert_close(float(loss), due)
    torch.testing.assert_close([one.grad for one in model.parameters()], grads)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", [chain, tied, Blocks, with_buffer])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "1f1b", "checkpoint": "always"},
        {"schedule": "interleaved-1f1b"},
        {"schedule": "zb-h1"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_a_step_sees_the_attributes(make: Any, options: dict[str, Any]) -> None:
    model = built(make)
    size = 1 if options["schedule"] == "interleaved-1f1b" and make is not chain else 2
    with Pipeline(model, X[:4], loss_fn=mse, devices=["cpu"] * size, num_microbatches=4, **options) as pipe:
        check(model, pipe.step(X, target=Y), make)


@pytest.mark.parametrize("schedule", ["chimera", "dualpipe"])
def test_copies_of_layers_see_the_attributes(schedule: str) -> None:
    model = built(chain)
    with Pipeline(model, X[:4], loss_fn=mse, devices=["cpu"] * 2, num_microbatches=4, schedule=schedule) as pipe:
        model[0].weight.multiplier = model[3].weight.multiplier = 2.0  # a change after construction counts, too
        loss = pipe.step(X, target=Y)

    def make() -> nn.Module:
        plain = chain()
        plain[0].weight.multiplier = plain[3].weight.multiplier = 2.0
        return plain

    check(model, loss, make)


def test_versions_of_weights_have_the_attributes() -> None:
    """An asynchronous schedule runs micro-batches with older weights."""
    losses = []
    for multiplier in (3.0, 2.0):
        model = built(chain)
        model[0].weight.multiplier = multiplier
        with Pipeline(
            model,
            X[:4],
            loss_fn=mse,
            devices=["cpu"] * 2,
            num_microbatches=4,
            schedule="pipedream",
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.0),
        ) as pipe:
            pipe.step(X, target=Y)
            losses.append(float(pipe.flush()))
        model = built(chain)
        model[0].weight.multiplier = multiplier
        torch.testing.assert_close(losses[-1], trained(model)[0])
    assert losses[0] != losses[1]


@pytest.mark.parametrize("make", [chain, tied, Blocks])
def test_reference_step_sees_the_attributes(make: Any) -> None:
    model = built(make)
    check(model, reference_step(model, X, loss_fn=mse, target=Y, num_microbatches=4), make)


@pytest.mark.parametrize("make", [chain, tied])
def test_what_a_forward_sets_on_a_stand_in_is_set_on_the_weight(make: Any) -> None:
    model = built(make)
    with Pipeline(model, X[:4], loss_fn=mse, devices=["cpu"], num_microbatches=4, boundaries=[]) as pipe:
        assert not hasattr(model[0].weight, "calls"), "construction leaves no trace"
        pipe.step(X, target=Y)
    assert model[0].weight.calls == (4 if make is chain else 12)


class FusedGradient(torch.autograd.Function):
    """A linear function whose backward adds the weight's gradient to a buffer of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad += grad.T @ x
        return grad @ ctx.weight, None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.weight.main_grad = torch.zeros(8, 8)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = FusedGradient.apply(x, self.weight)
        return made


@pytest.mark.parametrize("boundaries", [None, [1]], ids=["measured", "given cut"])
def test_fused_gradient_buffers_get_the_gradients_of_the_step_alone(boundaries: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fused(), Fused())
    plain = copy.deepcopy(model)
    for mine, theirs in zip(plain, model, strict=True):
        mine.weight.main_grad = theirs.weight.main_grad.clone()
    options: dict[str, Any] = {} if boundaries is None else {"boundaries": boundaries}
    with Pipeline(
        model, X[:4], loss_fn=mse, devices=["cpu"] * 2, num_microbatches=4, schedule="1f1b", **options
    ) as pipe:
        assert not model[0].weight.main_grad.any(), "construction leaves no trace"
        pipe.step(X.clone().requires_grad_(), target=Y)
    for x, y in zip(X.clone().requires_grad_().chunk(4), Y.chunk(4), strict=True):
        (mse(plain(x), y) / 4).backward()
    for mine, theirs in zip(plain, model, strict=True):
        torch.testing.assert_close(theirs.weight.main_grad, mine.weight.main_grad)
