"""Messages that a user meets in the first hour: each names what to do, and doing it works."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Microbatch, Numerics, Pipeline, Search
from pipesched.errors import GraphError, InputError, ModelTypeError
from pipesched.pipeline import auto_plan

X, Y = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 8
OPTIONS = {"devices": ["cpu"] * 2, "schedule": "1f1b", "num_microbatches": 4}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


@pytest.mark.parametrize("method", ["step", "evaluate"])
def test_a_loss_fn_without_a_target_has_two_remedies(method: str) -> None:
    with Pipeline(layers(), X[:4], loss_fn=functional.mse_loss, **OPTIONS) as pipe:
        with pytest.raises(InputError, match=rf"return the loss from the model .* or call {method}\(x, target=x\)"):
            getattr(pipe, method)(X)
        assert getattr(pipe, method)(X, target=X).isfinite()
    with pytest.raises(ModelTypeError, match=r"takes \(output\).*even if it does not use all of them"):
        Pipeline(layers(), X[:4], loss_fn=lambda output: output.mean(), **OPTIONS)
    with Pipeline(layers(), X[:4], loss_fn=lambda output, target: output.mean(), **OPTIONS) as pipe:
        assert pipe.step(X, target=X).isfinite()


class LogitsAndLoss(nn.Module):
    """Returns (logits, loss), as nanoGPT does."""

    def __init__(self, kind: type = tuple) -> None:
        super().__init__()
        self.body, self.kind = layers(), kind

    def forward(self, x: Tensor, targets: Tensor | None = None) -> object:
        logits = self.body(x)
        loss = None if targets is None else functional.cross_entropy(logits, targets)
        return {"logits": logits, "loss": loss} if self.kind is dict else (logits, loss)


def test_logits_and_loss_are_refused_with_a_remedy_that_works() -> None:
    expected = functional.cross_entropy(layers()(X), Y)
    said = r"got a tuple of a tensor of shape \[4, 8\], a tensor of shape \[\]; return a dict such as {'logits'"
    with Pipeline(LogitsAndLoss(), (X[:4], Y[:4]), **OPTIONS) as pipe, pytest.raises(InputError, match=said):
        pipe.step(X, Y)
    with Pipeline(LogitsAndLoss(dict), (X[:4], Y[:4]), **OPTIONS) as pipe:
        torch.testing.assert_close(pipe.step(X, Y), expected.detach())
    criterion = nn.CrossEntropyLoss()
    with Pipeline(LogitsAndLoss(), X[:4], loss_fn=criterion, **OPTIONS) as pipe:
        with pytest.raises(TypeError) as caught:
            pipe.step(X, target=Y)
        assert any("a tuple of a tensor of shape [4, 8], NoneType; choose a part" in n for n in caught.value.__notes__)
    chosen = Pipeline(LogitsAndLoss(), X[:4], loss_fn=lambda output, target: criterion(output[0], target), **OPTIONS)
    with chosen as pipe:
        torch.testing.assert_close(pipe.step(X, target=Y), expected.detach())


def test_a_reordered_model_is_said_to_be_reordered() -> None:
    model = layers()
    with Pipeline(model, X[:4], loss_fn=functional.mse_loss, **OPTIONS) as pipe:
        before = list(model)
        model[0], model[3] = before[3], before[0]
        with pytest.raises(GraphError, match="the order has changed: '0' is now the module that was '3'; restore"):
            pipe.step(X, target=X)
        model[0], model[3] = before[0], before[3]
        assert pipe.step(X, target=X).isfinite()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.body(x) * scale


@pytest.mark.parametrize("named", [False, True])
def test_given_micro_batches_may_have_arguments_without_rows(named: bool) -> None:
    scale = torch.full((8,), 2.0)
    sample = {"x": X[:4], "scale": scale} if named else (X[:4], scale)
    parts = list(zip(X.split(4), Y.split(4), strict=True))
    cut = [Microbatch(x=x, scale=scale, target=y) if named else Microbatch(x, scale, target=y) for x, y in parts]
    key = "scale" if named else 1
    options = {**OPTIONS, "loss_fn": functional.cross_entropy}
    with Pipeline(Scaled(), sample, numerics=Numerics(split_dims={key: None}), **options) as pipe:
        torch.testing.assert_close(pipe.step(microbatches=cut), functional.cross_entropy(layers()(X) * 2, Y).detach())
    wrong = Numerics(split_dims={"scala": None})
    with pytest.raises(InputError, match=r"no argument 'scala'; correct the key: the call has the arguments "):
        Pipeline(Scaled(), sample, numerics=wrong, **options).step(microbatches=cut)


@pytest.mark.parametrize("asked", [{}, {"search": Search(batch_size=16)}])
def test_a_warning_of_auto_that_is_an_error_has_a_remedy_that_works(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    options = {"loss_fn": functional.mse_loss, "devices": ["cpu"] * 2}
    words = "schedule= without search=" if asked else "schedule="
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "layer times (should add up|must be measured on an idle machine)")
        with monkeypatch.context() as patch:
            patch.setattr(auto_plan, "too_small", lambda *_: "too small to gain")  # however fast the machine is
            with pytest.raises(UserWarning, match=rf"too small to gain; pass one device, or pass {words} to use sev"):
                Pipeline(layers(), X[:4], **options, **asked)
        for changed in ({"devices": ["cpu"], **asked}, {"schedule": "1f1b"}):
            with Pipeline(layers(), X[:4], **{**options, **changed}) as pipe:
                assert pipe.step(X, target=X).isfinite()
