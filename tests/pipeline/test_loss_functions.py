"""Loss functions of users: their first calls show how they reduce over rows; what they may not use is refused."""

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Numerics, Pipeline
from pipesched.errors import InputError
from pipesched.testing import reference_step

Loss = Callable[[Any, Tensor], Tensor]

torch.manual_seed(0)
X = torch.randn(11, 8)
LABELS = torch.arange(11) % 6
PADDED = LABELS.clone()
PADDED[3:6] = -100
VALUES = torch.linspace(-1, 1, 66).reshape(11, 6)
CLASSES = torch.rand(6)
cross_entropy, mse = functional.cross_entropy, functional.mse_loss


class Criterion(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.CrossEntropyLoss(weight=CLASSES)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.inner(output * self.scale, target)
        return loss


class Method:
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target)


def mixed(output: Tensor, target: Tensor) -> Tensor:
    total = torch.zeros(())
    for loss in (mse(output, target), functional.l1_loss(output, target)):
        total += 0.5 * loss
    return total


def own_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return -output.log_softmax(-1).gather(1, target[:, None]).mean()


OF_LABELS: dict[str, Loss] = {
    "lambda": lambda output, target: cross_entropy(output, target),  # noqa: PLW0108  # what users write
    "module": Criterion(),
    "module with weights": Weighted(),
    "method": Method().loss,
    "reshaped": lambda output, target: cross_entropy(output.view(-1, 6), target.view(-1)),
    "in two terms": lambda output, target: 0.5 * (cross_entropy(output, target) + cross_entropy(2 * output, target)),
    "with weights of classes": lambda output, target: cross_entropy(output, target, weight=CLASSES),
    "another ignored label": lambda output, target: cross_entropy(output, target.clamp(min=0), ignore_index=0),
    "nll": lambda output, target: functional.nll_loss(output.log_softmax(1), target),
    "sum": lambda output, target: cross_entropy(output, target, reduction="sum"),
    "sum of what is not padding": lambda output, target: cross_entropy(output, target, reduction="none")[
        target >= 0
    ].sum(),
}
OF_VALUES: dict[str, Loss] = {
    "mean": lambda output, target: (output - target).square().mean(),
    "sum": lambda output, target: (output - target).square().sum(),
    "sum of sums": lambda output, target: (output - target).square().sum(1).sum(),
    "mean of sums over features": lambda output, target: (output - target).square().sum(dim=1).mean(),
    "sum of means over rows": lambda output, target: (output - target).square().mean(0).sum(),
    "no reduction, then a mean": lambda output, target: mse(output, target, reduction="none").mean(),
    "mixed": mixed,
    "Python's sum": lambda output, target: sum([mse(output, target), functional.l1_loss(output, target)]) / 2,
    "stacked": lambda output, target: torch.stack([mse(output, target), functional.l1_loss(output, target)]).mean(),
    "batchmean": lambda output, target: functional.kl_div(
        output.log_softmax(1), target.softmax(1), reduction="batchmean"
    ),
    "several terms beside each other": lambda output, target: (
        torch.cat([output - target, output.sin()], -1).square().mean()
    ),
    "several terms below each other": lambda output, target: torch.cat([output - target, output.sin()]).square().sum(),
    "transposed": lambda output, target: (output - target).T.square().mean(),
    "flat": lambda output, target: mse(output.flatten(), target.flatten()),
    "a multiple": lambda output, target: 3.5 * mse(output, target) - 1,
    "a sum that counts nothing": lambda output, target: mse(output, target) + 0 * output.sum(),
    "an L2 term of a constant": lambda output, target: mse(output, target) + CLASSES.square().sum(),
}
UNCLEAR: dict[str, tuple[Loss, Numerics | None]] = {
    "root of a mean": (lambda output, target: mse(output, target).sqrt(), None),
    "norm": (lambda output, target: (output - target).norm(), None),
    "sum / len": (
        lambda output, target: (output - target).square().sum() / len(output),
        Numerics(loss_reduction="mean"),
    ),
    "mean of chosen values": (
        lambda output, target: (output - target).square()[target > 0].mean(),
        Numerics(loss_weight=lambda target: (target > 0).sum()),
    ),
    "masked mean": (
        lambda output, target: ((output - target).square() * (target > 0)).sum() / (target > 0).sum(),
        Numerics(loss_weight=lambda target: (target > 0).sum()),
    ),
    "mean * len": (lambda output, target: mse(output, target) * output.shape[0], Numerics(loss_reduction="sum")),
    "sum over rows, then a mean": (
        lambda output, target: (output - target).square().sum(0).mean(),
        Numerics(loss_reduction="sum"),
    ),
    "mean and sum": (lambda output, target: mse(output, target) + (output - target).square().sum(), None),
    "first row": (lambda output, target: (output - target)[0].square().mean(), None),
    "hardest rows": (lambda output, target: (output - target).square().sum(1).topk(2).values.mean(), None),
    "the largest": (lambda output, target: (output - target).abs().max(), None),
    "means with other weights": (lambda output, target: mse(output, target) * mse(output, target), None),
    "sum and a constant": (lambda output, target: (output - target).square().sum() + CLASSES.sum(), None),
    "a custom function": (
        lambda output, target: Square.apply(output - target),
        Numerics(loss_reduction="sum"),
    ),
}


class Square(torch.autograd.Function):
    """Computes a sum outside torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(numpy.asarray(numpy.square(x.detach().numpy()).sum()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))


def pipeline(layers: nn.Module, loss_fn: Any, **options: Any) -> Pipeline:
    given: dict[str, Any] = {"devices": ["cpu"] * 2, "schedule": "1f1b", "num_microbatches": 4, **options}
    return Pipeline(layers, X[:3], loss_fn=loss_fn, **given)


def check(loss_fn: Loss, target: Tensor, **options: Any) -> None:
    """Compare two steps and an evaluation with plain PyTorch on the whole batch, and a step with the reference."""
    ours, plain, reference = model(), model(), model()
    with pipeline(ours, loss_fn, **options) as pipe:
        for _ in range(2):
            loss = pipe.step(X, target=target)
            due = loss_fn(plain(X), target)
            due.backward()
            torch.testing.assert_close(loss, due.detach())
            torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
            ours.zero_grad()
            plain.zero_grad()
        torch.testing.assert_close(pipe.evaluate(X, target=target), due.detach())
    own = {} if (numerics := options.get("numerics")) is None else {"loss_reduction": numerics.loss_reduction}
    given = {"loss_fn": loss_fn, "target": target, "num_microbatches": options.get("num_microbatches", 4), **own}
    assert torch.equal(reference_step(reference, X, **given), loss)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OF_LABELS)
@pytest.mark.parametrize("target", [LABELS, PADDED], ids=["labels", "padded"])
def test_losses_of_labels_add_up_to_that_of_the_batch(name: str, target: Tensor) -> None:
    check(OF_LABELS[name], target)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OF_VALUES)
def test_losses_of_values_add_up_to_that_of_the_batch(name: str) -> None:
    check(OF_VALUES[name], VALUES)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe"},
        {"schedule": "interleaved-1f1b"},
        {"schedule": "zb-h1"},
        {"schedule": "chimera"},
        {"schedule": "dualpipe-v"},
        {"checkpoint": "always"},
        {"devices": ["cpu"], "boundaries": []},
        {"num_microbatches": 11},
        {"num_microbatches": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["lambda", "sum", "module"])
def test_the_plan_does_not_matter(name: str, options: dict[str, Any]) -> None:
    check(OF_LABELS[name], PADDED, **options)


def test_the_known_loss_and_the_same_loss_in_a_lambda_have_equal_bits() -> None:
    losses = []
    for loss_fn in (cross_entropy, OF_LABELS["lambda"], OF_LABELS["module"]):
        layers = model()
        with pipeline(layers, loss_fn) as pipe:
            losses.append([pipe.step(X, target=PADDED), *(p.grad for p in layers.parameters())])
    for other in losses[1:]:
        assert all(map(torch.equal, losses[0], other))


def test_a_loss_of_parts_of_the_target() -> None:
    """Labels in a dict, shifted by one: the labels that count are those of the shifted ones."""
    x, ids = torch.randn(6, 5, 8), torch.randint(0, 6, (6, 5))
    ids[:4, 2:] = -100

    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return cross_entropy(output[:, :-1].reshape(-1, 6), target["ids"][:, 1:].reshape(-1))

    ours, plain = model(), model()
    with Pipeline(ours, x[:2], loss_fn=loss_fn, devices=["cpu"] * 2, schedule="1f1b", num_microbatches=3) as pipe:
        loss = pipe.step(x, target={"ids": ids})
    due = loss_fn(plain(x), {"ids": ids})
    due.backward()
    torch.testing.assert_close(loss, due.detach())
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", UNCLEAR)
def test_an_unclear_loss_is_refused_and_the_remedy_works(name: str) -> None:
    loss_fn, numerics = UNCLEAR[name]
    with pipeline(model(), loss_fn) as pipe, pytest.raises(InputError, match="mean or a sum over the rows") as caught:
        pipe.step(X, target=VALUES)
    assert "loss_weight=" in str(caught.value)
    with pytest.raises(InputError, match="mean or a sum over the rows"):
        reference_step(model(), X, loss_fn=loss_fn, target=VALUES, num_microbatches=4)
    with pipeline(model(), loss_fn, num_microbatches=1) as pipe:  # a single micro-batch is the batch
        torch.testing.assert_close(pipe.step(X, target=VALUES), loss_fn(model()(X), VALUES).detach())
    if numerics is not None:
        ours, plain = model(), model()
        with pipeline(ours, loss_fn, numerics=numerics) as pipe:
            loss = pipe.step(X, target=VALUES)
        due = loss_fn(plain(X), VALUES)
        due.backward()
        torch.testing.assert_close(loss, due.detach())
        torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


def test_terms_that_weight_micro_batches_differently_are_refused_where_they_do() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target) + output.square().mean()

    check(loss_fn, LABELS)
    with pipeline(model(), loss_fn) as pipe, pytest.raises(InputError, match="must weight the micro-batches alike"):
        pipe.step(X, target=PADDED)


def test_a_loss_that_changes_its_reduction_is_refused() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output, target, reduction="sum" if target[0] else "mean")

    with pipeline(model(), loss_fn) as pipe, pytest.raises(InputError, match="in the same way in all micro-batches"):
        pipe.step(X, target=LABELS)


# ---- what a loss may use --------------------------------------------------------------------------------------------


def keeping(layers: nn.Sequential, place: int, keep: Callable[[Tensor], Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    layers[place].register_forward_hook(lambda module, given, made: kept.update(value=keep(made)))
    return kept


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("keep", [Tensor.detach, lambda made: made, lambda made: made.mean().clone()])
def test_a_tensor_that_a_hook_of_another_stage_keeps_is_refused(place: int, keep: Callable[[Tensor], Any]) -> None:
    layers = model()
    kept = keeping(layers, place, keep)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) + kept["value"].square().mean()

    with pipeline(layers, loss_fn, boundaries=[2]) as pipe, pytest.raises(InputError, match="layer or a hook has kept"):
        pipe.step(X, target=VALUES)


def test_a_tensor_of_the_last_stage_is_refused_if_copies_run_at_the_same_time() -> None:
    layers = model()
    kept = keeping(layers, -2, Tensor.detach)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) + kept["value"].square().mean()

    with pipeline(layers, loss_fn, boundaries=[1]) as pipe:
        assert pipe.step(X, target=VALUES).isfinite()
    with (
        pipeline(layers, loss_fn, boundaries=[1], schedule="chimera") as pipe,
        pytest.raises(InputError, match="layer or a hook has kept"),
    ):
        pipe.step(X, target=VALUES)


def test_a_tensor_that_a_layer_stores_is_refused() -> None:
    class Stores(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = super().forward(x)
            return self.seen

    layers = model()
    layers[0] = Stores(8, 8)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) + layers[0].seen.detach().square().mean()

    with pipeline(layers, loss_fn, boundaries=[2]) as pipe, pytest.raises(InputError, match="layer or a hook has kept"):
        pipe.step(X, target=VALUES)


def test_a_tensor_of_the_same_forward_may_be_used() -> None:
    """With one stage, the loss follows the forward of its own micro-batch."""
    ours, plain = model(), model()
    results = []
    for layers in (ours, plain):
        kept = keeping(layers, 0, lambda made: made)

        def loss_fn(output: Tensor, target: Tensor, kept: Any = kept) -> Tensor:
            return mse(output, target) + kept["value"].square().mean()

        if layers is ours:
            with pipeline(ours, loss_fn, devices=["cpu"]) as pipe:
                results.append(pipe.step(X, target=VALUES))
        else:
            due = loss_fn(plain(X), VALUES)
            due.backward()
            results.append(due.detach())
    torch.testing.assert_close(*results)
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("has_weights_of_first", [True, False])
def test_a_loss_may_use_weights_of_the_last_stage_alone(has_weights_of_first: bool) -> None:
    layers = model()
    used = layers[0].weight if has_weights_of_first else layers[4].weight

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse(output, target) + 0.1 * used.square().sum()

    with pipeline(layers, loss_fn, boundaries=[2]) as pipe:
        if has_weights_of_first:
            with pytest.raises(InputError, match=r"it uses the weight '0\.weight' of stage 0"):
                pipe.step(X, target=VALUES)
            return
        loss = pipe.step(X, target=VALUES)
    plain = model()
    due = mse(plain(X), VALUES) + 0.1 * plain[4].weight.square().sum()
    due.backward()
    torch.testing.assert_close(loss, due.detach())
    torch.testing.assert_close([p.grad for p in layers.parameters()], [p.grad for p in plain.parameters()])


def test_frozen_weights_and_constants_may_be_used() -> None:
    layers = model()
    layers[0].requires_grad_(False)
    teacher = copy.deepcopy(layers).requires_grad_(False)
    constant = torch.rand(6)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (
            mse(output, target)
            + (teacher[4].weight @ constant[:, None].repeat(1, 8).T[:, :6]).square().mean() * 0
            + (layers[0].weight.square().sum())
        )

    with pipeline(layers, loss_fn, boundaries=[2]) as pipe:
        loss = pipe.step(X, target=VALUES)
    torch.testing.assert_close(loss, (mse(model()(X), VALUES) + model()[0].weight.square().sum()).detach())


def by_the_target(output: Tensor, target: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output.sum(), target, create_graph=True)
    return slope.square().mean()


def unused(output: Tensor, target: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(output.sum(), target, create_graph=True, allow_unused=True)
    return mse(output, slope)


def own_backward(output: Tensor, target: Tensor) -> Tensor:
    loss = mse(output, target)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (by_the_target, "may differentiate only by tensors"),
        (unused, "may differentiate only by tensors"),
        (own_backward, "must not call backward"),
    ],
)
def test_derivatives_that_a_loss_cannot_know_are_refused(loss_fn: Loss, said: str) -> None:
    with pipeline(model(), loss_fn) as pipe, pytest.raises(InputError, match=said):
        pipe.step(X, target=VALUES.clone().requires_grad_())


def test_a_loss_may_differentiate_by_the_output() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.square().sum(), output, create_graph=True)
        return mse(slope, target)

    ours, plain = model(), model()
    with pipeline(ours, loss_fn, numerics=Numerics(loss_reduction="mean")) as pipe:
        loss = pipe.step(X, target=VALUES)
    due = loss_fn(plain(X), VALUES)
    due.backward()
    torch.testing.assert_close(loss, due.detach())
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
