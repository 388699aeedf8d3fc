"""Jobs that compare training with gradient clipping or a scaler with the same training in a plain loop."""

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional

from pipesched import Kind, Numerics, Pipeline
from pipesched.errors import ExecutionError, InputError
from pipesched.testing import clip_grad_norm_, reference_step
from tests.support.places import pipeline

ROWS, MICROBATCHES, VOCABULARY = 12, 4, 16


class Head(nn.Linear):
    """A head that uses the embedding's weight."""


def tied_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model with an embedding and a head that share a weight, dropout, norms, and a frozen layer."""
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, 8)]
    for _ in range(4):
        layers += [nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.1)]
    layers += [nn.Linear(8, 8).requires_grad_(False), Head(8, VOCABULARY, bias=False)]
    layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers).to(dtype)


def plain_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return the model of `tied_model`, but with separate weights."""
    model = tied_model()
    model[-1].weight = nn.Parameter(model[-1].weight.detach().clone())
    return model.to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (ROWS,), generator=generator), torch.randint(
        VOCABULARY, (ROWS,), generator=generator
    )


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return 30 * functional.cross_entropy(output.float(), target)


def spoilt_once(microbatch: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss function that returns NaN in one micro-batch of the first step."""
    calls: list[int] = []

    def spoilt(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(calls))
        return loss_fn(output, target) * (math.nan if len(calls) == microbatch + 1 else 1)

    return spoilt


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def assert_same(pipe: Pipeline, expected: nn.Module) -> None:
    """Check that the parameters of this process are bit-identical to those of ``expected``."""
    due = dict(expected.named_parameters())
    assert [name for name, one in pipe.named_parameters() if not torch.equal(one, due[name])] == []


def pipelined(group: Any, model: nn.Module, **options: Any) -> AbstractContextManager[Pipeline]:
    """Return a pipeline of one of this file's models."""
    return pipeline(group, model, batch(0)[0][:3], loss_fn=loss_fn, **options)


class Case(NamedTuple):
    """A model, and the settings of its pipeline."""

    schedule: str
    make: Callable[[torch.dtype], nn.Sequential]
    dtype: torch.dtype
    checkpoint: Any

    def models(self) -> tuple[nn.Sequential, nn.Sequential]:
        """Return the model twice: for the plain loop and for the pipeline."""
        return self.make(self.dtype), self.make(self.dtype)

    def pipelined(self, group: Any, model: nn.Module, **options: Any) -> AbstractContextManager[Pipeline]:
        return pipelined(group, model, schedule=self.schedule, checkpoint=self.checkpoint, **options)


def loop_step(model: nn.Module, optimizer: Any, step: int, norm_type: float) -> tuple[Tensor, Tensor]:
    """Run a step of the plain loop with clipping; return its loss and norm."""
    x, y = batch(step)
    loss = reference_step(model, x, loss_fn=loss_fn, target=y, num_microbatches=MICROBATCHES, seed=5, step=step)
    norm = clip_grad_norm_(model.parameters(), 1.0, norm_type)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def clip_between_steps(group: Any, case: Case, norm_type: float, steps: int = 3) -> list[float]:
    """Clip after each step, and then call an optimizer outside the pipeline. Returns the norms.

    Checks that norms, losses and weights are bit-identical to those of a plain loop.
    """
    expected, actual = case.models()
    theirs = adam(expected.parameters())
    norms = []
    with case.pipelined(group, actual) as pipe:
        mine = adam(pipe.parameters())
        for step in range(steps):
            loss, due = loop_step(expected, theirs, step, norm_type)
            x, y = batch(step)
            assert torch.equal(pipe.step(x, target=y), loss)
            norm = pipe.clip_grad_norm_(1.0, norm_type)
            assert norm.dtype == torch.float32
            assert torch.equal(norm, due)
            assert float(norm) > 1.0
            mine.step()
            mine.zero_grad()
            assert_same(pipe, expected)
            norms.append(float(norm))
    return norms


def refuse_norms(group: Any) -> None:
    """Check errors: a norm that is not finite, different arguments on one rank, and missing gradients."""
    model = plain_model()
    with pipelined(group, model) as pipe:
        x, y = batch(0)
        pipe.step(x, target=y)
        before = {name: copy.deepcopy(one.grad) for name, one in pipe.named_parameters()}
        own = [one for name, one in pipe.named_parameters() if name == "4.weight"]
        for one in own:
            one.grad[0, 0] = math.inf
            before["4.weight"][0, 0] = math.inf
        with pytest.raises(ExecutionError, match=r"norm of all gradients is inf, and '4\.weight' is the first"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        for name, one in pipe.named_parameters():
            assert one.grad is None or torch.equal(one.grad, before[name])
        assert pipe.clip_grad_norm_(math.inf).isinf()
        for one in own:
            one.grad[0, 0] = 0
        rank = getattr(group, "rank", int)()
        if group.size() > 1 and hasattr(group, "rank"):
            with pytest.raises(InputError, match="rank 1 passed"):
                pipe.clip_grad_norm_(1.0 + rank)
        assert pipe.clip_grad_norm_(math.inf).isfinite()
        pipe.zero_grad()
        assert pipe.clip_grad_norm_(1.0) == 0
    with pipelined(group, plain_model(), optimizer=adam) as pipe:
        pipe.step(x, target=y)
        with pytest.raises(InputError, match=r"clip_grad_norm=1\.0"):
            pipe.clip_grad_norm_(1.0)


def clip_in_steps(group: Any, case: Case, norm_type: float, steps: int = 3) -> list[float]:
    """Clip inside the steps, with optimizer= and Numerics(clip_grad_norm=). Returns the norms.

    Checks that norms, losses and weights are bit-identical to those of a plain loop.
    """
    expected, actual = case.models()
    theirs = adam(expected.parameters())
    norms = []
    numerics = Numerics(clip_grad_norm=1.0, norm_type=norm_type)
    with case.pipelined(group, actual, optimizer=adam, numerics=numerics) as pipe:
        assert pipe.grad_norm is None
        for step in range(steps):
            loss, due = loop_step(expected, theirs, step, norm_type)
            x, y = batch(step)
            assert torch.equal(pipe.step(x, target=y), loss)
            assert torch.equal(pipe.grad_norm, due)
            assert_same(pipe, expected)
            assert all(parameter.grad is None for parameter in pipe.parameters())
            norms.append(float(due))
        kinds = [span.action.kind for span in pipe.gather_trace().spans]
        assert kinds.count(Kind.NORM) == kinds.count(Kind.UPDATE) == pipe.num_stages
        assert pipe.predicted.makespan_s > 0
    return norms


def overflow_in(model: nn.Sequential, layer: int | None, at_step: int) -> Callable[[], None]:
    """Make the gradient of a layer's weight infinite in one step; ``layer`` None changes nothing.

    Returns a function to call after each step.
    """
    step = 0

    def hook(grad: Tensor) -> Tensor:
        return grad / 0 if step == at_step else grad

    def next_step() -> None:
        nonlocal step
        step += 1

    if layer is not None:
        model[layer].weight.register_hook(hook)
    return next_step


def scaled_update(pipe: Pipeline, scaler: GradScaler, optimizer: Any) -> Tensor:
    """Unscale, clip and update, as torch's documentation of GradScaler describes. Return the norm."""
    scaler.unscale_(optimizer)
    norm = pipe.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return norm


def refuse_ranks_without_gradients(group: Any) -> None:
    """Check the error for a rank whose layers are frozen, so that its scaler has no gradient."""
    model = plain_model()
    for layer in model[: len(model) // 2]:
        layer.requires_grad_(False)
    numerics = Numerics(scaler=GradScaler("cpu"))
    with pipeline(group, model, batch(0)[0][:3], loss_fn=loss_fn, numerics=numerics) as pipe:
        x, y = batch(0)
        with pytest.raises(InputError, match=r"every rank needs a gradient.* rank 0 of 2 has no gradient"):
            pipe.step(x, target=y)


def accumulate_after_an_overflow(group: Any) -> None:
    """Accumulate two steps per update. Check that an overflow in the first step skips the update of all optimizers."""
    model = plain_model()
    planted = overflow_in(model, 1, 0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    with pipeline(group, model, batch(0)[0][:3], loss_fn=loss_fn, numerics=Numerics(scaler=scaler)) as pipe:
        parameters = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
        optimizers = [adam(parameters[:1]), adam(parameters[1:])]
        before = copy.deepcopy(parameters)
        for update in range(2):
            for step in range(2):
                x, y = batch(step)
                assert pipe.step(x, target=y).isfinite()
                planted()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            pipe.zero_grad()
            same = all(map(torch.equal, before, parameters))
            assert same == (update == 0)
            assert scaler.get_scale() == 512.0


def scale_losses(
    group: Any,
    case: Case,
    overflow: int | None,
    optimizers: bool,
    init_scale: float = 1024.0,
    steps: int = 4,
) -> tuple[int, list[float]]:
    """Train with a scaler. Returns the number of skipped updates, and the scale after each step.

    Checks that losses, norms, weights and the scaler's state equal those of a plain loop with its own GradScaler.

    overflow: the layer whose weight gets an infinite gradient in step 1. None: train under float16 autocast instead, in
    which a large scale makes gradients overflow. optimizers: whether steps update the weights. If not, the job calls
    the scaler and an optimizer itself.
    """
    expected, actual = case.models()
    due, scaler = (GradScaler("cpu", init_scale=init_scale, growth_interval=2) for _ in range(2))
    half = torch.autocast("cpu", torch.float16, enabled=overflow is None)
    counts = [overflow_in(model, overflow, 1) for model in (expected, actual)]
    theirs = adam(expected.parameters())
    numerics = Numerics(clip_grad_norm=1.0 if optimizers else None, scaler=scaler)
    scales = []
    skips = 0
    with case.pipelined(group, actual, optimizer=adam if optimizers else None, numerics=numerics) as pipe:
        assert pipe.scaler is scaler
        mine = None if optimizers else adam(pipe.parameters())
        for step in range(steps):
            x, y = batch(step)
            with half:
                scaled = reference_step(
                    expected,
                    x,
                    loss_fn=lambda output, target: due.scale(loss_fn(output, target)),
                    target=y,
                    num_microbatches=MICROBATCHES,
                    seed=5,
                    step=step,
                )
                loss = pipe.step(x, target=y)
            assert torch.equal(loss, scaled / due.get_scale())
            due.unscale_(theirs)
            norm = clip_grad_norm_(expected.parameters(), 1.0)
            before = due.get_scale()
            due.step(theirs)
            due.update()
            theirs.zero_grad()
            actual_norm = pipe.grad_norm if mine is None else scaled_update(pipe, scaler, mine)
            skips += due.get_scale() < before
            scales.append(scaler.get_scale())
            assert scaler.state_dict() == due.state_dict()
            assert torch.equal(actual_norm, norm) or (not norm.isfinite() and not actual_norm.isfinite())
            assert_same(pipe, expected)
            for count in counts:
                count()
    return skips, scales


class Faulty(nn.Module):
    """Multiplies its input by a weight. In one call, makes the output or the gradient infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.calls = 0
        self.at = 6  # micro-batch 2 of step 1; a step has four micro-batches
        self.backward = False

    def forward(self, x: Tensor) -> Tensor:
        faulty = self.calls == self.at
        self.calls += 1
        if not faulty:
            return x * self.weight
        if self.backward:
            x = x * self.weight
            x.register_hook(lambda grad: grad / 0)
            return x
        return x * self.weight / 0


def find_nonfinite(group: Any, react: str, backward: bool, optimizers: bool, tied: bool) -> list[str]:
    """Run three steps. In the second step, layer 6 makes a value infinite. Return the errors and warnings."""
    model = (tied_model if tied else plain_model)()
    model[6] = Faulty()
    model[6].backward = backward
    numerics = Numerics(on_nonfinite=react)
    messages = []
    with pipelined(group, model, optimizer=adam if optimizers else None, numerics=numerics) as pipe:
        pipe.model[6].calls = 0  # the capture of the model has called this layer
        own = None if optimizers else adam(pipe.parameters())
        for step in range(3):
            before = [parameter.detach().clone() for parameter in pipe.parameters()]
            x, y = batch(step)
            updated = True
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                try:
                    pipe.step(x, target=y)
                except ExecutionError as error:
                    messages.append(str(error))
                    updated = False
                    pipe.zero_grad()
            messages += [str(one.message) for one in seen if "must be finite" in str(one.message)]
            if own is not None and updated:
                own.step()
                own.zero_grad()
            if step == 1 and react != "warn":
                assert all(map(torch.equal, before, pipe.parameters()))
            elif step != 2 or react != "warn":
                same = [torch.equal(*pair) for pair in zip(before, pipe.parameters(), strict=True)]
                assert not all(same) or not any(parameter.requires_grad for parameter in pipe.parameters())
    return messages


def fail_before_norms(group: Any) -> tuple[str, str]:
    """Make rank 0 fail while other ranks wait for its norms. Return the type and the text of this rank's error."""
    model = plain_model()
    with pipelined(group, model, optimizer=adam, numerics=Numerics(clip_grad_norm=1.0)) as pipe:
        x, y = batch(0)
        pipe.step(x, target=y)
        calls = []

        def fail(grad: Tensor) -> Tensor:
            calls.append(grad)
            if len(calls) == MICROBATCHES:
                raise ZeroDivisionError("planted")
            return grad

        if group.rank() == 0:
            model[0].weight.register_hook(fail)
        try:
            pipe.step(x, target=y)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


class WithEmpty(nn.Module):
    """A layer with a parameter that has no elements, such as an empty adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(6, 6), nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.extra.sum()


def train_with_empty(group: Any, numerics: dict[str, Any]) -> None:
    """Check that a step with a scaler or with clipping gives the weights of a plain loop."""
    given = dict(numerics)
    if "scaler" in given:
        given["scaler"] = GradScaler("cpu", init_scale=given["scaler"])
    torch.manual_seed(0)
    x, model = torch.randn(8, 6), nn.Sequential(WithEmpty(), WithEmpty())
    plain = copy.deepcopy(model)
    reference_step(plain, x, target=x, loss_fn=functional.mse_loss, num_microbatches=4)
    if "scaler" not in given:
        grads = [p for p in plain.parameters() if p.numel()]  # torch has no infinity norm of an empty tensor
        torch.nn.utils.clip_grad_norm_(grads, 0.1, math.inf)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    options = {"optimizer": lambda own: torch.optim.SGD(own, lr=0.1), "numerics": Numerics(**given)}
    with pipeline(group, model, x[:2], loss_fn=functional.mse_loss, **options) as pipe:
        pipe.step(x, target=x)
        expected = plain.state_dict()
        assert all(torch.allclose(value, expected[name]) for name, value in pipe.state_dict().items())
