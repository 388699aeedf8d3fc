"""Promise 1: the plan never changes the result. Loss, gradients and buffers, bit by bit, dropout included."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipesched import Numerics, Pipeline, schedules
from pipesched.errors import ExecutionError
from pipesched.testing import reference_step
from tests.support.models import KINDS, assert_equal_bits, compare_step, gradients, mixed_model, shapes

pytestmark = pytest.mark.usefixtures("every_product_deferred")

ROWS = 19  # does not divide by any number of micro-batches used here
X = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (ROWS,), generator=torch.Generator().manual_seed(2))
MODES = ("never", "always", "except_last")


def even_boundaries(num_layers: int, num_stages: int) -> list[int]:
    return [num_layers * stage // num_stages for stage in range(1, num_stages)]


def wrap(model: nn.Sequential, name: str, num_ranks: int, microbatches: int, **options) -> Pipeline:
    chunks = schedules.get(name).chunks_per_rank
    cut = even_boundaries(12, num_ranks * chunks)
    return Pipeline(
        model,
        X[:2],
        loss_fn=functional.cross_entropy,
        devices=["cpu"] * num_ranks,
        schedule=name,
        num_microbatches=microbatches,
        boundaries=cut,
        **options,
    )


@pytest.mark.one_in(60)
@pytest.mark.parametrize(("name", "num_ranks"), list(shapes(max_stages=4)))
def test_steps_equal_the_unpipelined_loop(name: str, num_ranks: int) -> None:
    for microbatches, mode in ((1, "never"), (3, "except_last"), (4, "always"), (8, "never")):
        expected, actual = mixed_model(), mixed_model()
        with wrap(actual, name, num_ranks, microbatches, checkpoint=mode, seed=5) as pipe:
            for step in range(2):  # the second adds to the gradients of the first
                compare_step(pipe, expected, X, target=Y, seed=5, step=step)


def plain_model() -> nn.Sequential:
    """Without randomness: plain PyTorch gives the same bits."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Linear(8, 16),
        nn.Tanh(),
        nn.BatchNorm1d(16),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def plain_loop(model: nn.Sequential, microbatches: int) -> torch.Tensor:
    """Gradient accumulation as anybody writes it."""
    total = torch.zeros(())
    for x, y in zip(X.tensor_split(microbatches), Y.tensor_split(microbatches), strict=True):
        loss = functional.cross_entropy(model(x), y) * (len(x) / ROWS)
        loss.backward()
        total = total + loss.detach()
    return total


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "num_ranks"), list(shapes(max_stages=4)))
@pytest.mark.parametrize("microbatches", [2, 7])
def test_without_dropout_plain_pytorch_gives_the_same_bits(name: str, num_ranks: int, microbatches: int) -> None:
    expected, actual = plain_model(), plain_model()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        wanted = plain_loop(expected, microbatches)
    finally:
        torch.set_num_threads(threads)
    stages = num_ranks * schedules.get(name).chunks_per_rank
    with Pipeline(
        actual,
        X[:2],
        loss_fn=functional.cross_entropy,
        devices=["cpu"] * num_ranks,
        schedule=name,
        num_microbatches=microbatches,
        boundaries=even_boundaries(9, stages),
    ) as pipe:
        loss = pipe.step(X, target=Y)
    assert torch.equal(loss, wanted)
    assert_equal_bits(gradients(actual), gradients(expected))
    assert_equal_bits(dict(actual.named_buffers()), dict(expected.named_buffers()))


def test_training_continues_under_another_plan_with_the_same_bits() -> None:
    """Weights after four steps: all under one plan, or two and two under different ones."""

    def train(*plans: tuple[str, int, int]) -> dict[str, torch.Tensor]:
        model = mixed_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        done = 0
        for name, num_ranks, steps in plans:
            with wrap(model, name, num_ranks, 4, seed=7) as pipe:
                pipe._running.step = done  # saving and loading the step count belongs to a later version
                for _ in range(steps):
                    pipe.step(X, target=Y)
                    optimizer.step()
                    optimizer.zero_grad()
                done += steps
        return model.state_dict()

    expected = train(("gpipe", 1, 4))
    assert_equal_bits(train(("1f1b", 3, 4)), expected)
    assert_equal_bits(train(("zb-h1", 4, 2), ("interleaved-1f1b", 2, 2)), expected)


def test_batch_sizes_change_from_step_to_step() -> None:
    expected, actual = mixed_model(), mixed_model()
    with wrap(actual, "zb-h1", 3, 4, seed=3) as pipe:
        for step, rows in enumerate((19, 8, 13, 19)):
            compare_step(pipe, expected, X[:rows], target=Y[:rows], seed=3, step=step)


@pytest.mark.parametrize("name", KINDS)
def test_a_loss_module_and_loss_weights(name: str) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(output * self.scale, target, ignore_index=0)

    def counted(target: torch.Tensor) -> torch.Tensor:
        return (target != 0).sum()

    expected, actual = mixed_model(), mixed_model()
    expected_loss, actual_loss = Weighted(), Weighted()
    wanted = reference_step(
        expected, X, target=Y, loss_fn=expected_loss, num_microbatches=4, seed=1, loss_weight=counted
    )
    stages = 2 * schedules.get(name).chunks_per_rank
    with Pipeline(
        actual,
        X[:2],
        loss_fn=actual_loss,
        devices=["cpu", "cpu"],
        schedule=name,
        num_microbatches=4,
        boundaries=even_boundaries(11, stages),
        seed=1,
        numerics=Numerics(loss_weight=counted),
    ) as pipe:
        assert torch.equal(pipe.step(X, target=Y), wanted)
        assert "loss_fn.scale" in dict(pipe.named_parameters())
        assert "loss_fn.scale" in pipe.state_dict()
    assert_equal_bits(gradients(actual), gradients(expected))
    assert_equal_bits(gradients(actual_loss), gradients(expected_loss))


def test_weighted_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    """Uneven micro-batches, mean over rows: the same gradient as one batch, within rounding."""
    whole, actual = plain_model().eval(), plain_model().eval()
    functional.cross_entropy(whole(X), Y).backward()
    with Pipeline(
        actual, X[:2], loss_fn=functional.cross_entropy, devices=["cpu"] * 2, num_microbatches=4, boundaries=[4]
    ) as pipe:
        pipe.eval().step(X, target=Y)
    for name, grad in gradients(whole).items():
        torch.testing.assert_close(gradients(actual)[name], grad)


@pytest.mark.parametrize("mode", MODES)
def test_autocast_of_the_caller_holds_and_splits_equal_bits(mode: str) -> None:
    expected, actual = mixed_model(), mixed_model()
    with wrap(actual, "zb-h1", 3, 4, checkpoint=mode, seed=2) as pipe, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pipe.step(X, target=Y)
        wanted = reference_step(expected, X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=4, seed=2)
    assert torch.equal(loss, wanted)
    assert_equal_bits(gradients(actual), gradients(expected))
    plain = mixed_model()
    assert not torch.equal(
        loss, reference_step(plain, X, target=Y, loss_fn=functional.cross_entropy, num_microbatches=4, seed=2)
    )


@pytest.mark.parametrize(("num_ranks", "num_stages"), [(1, 1), (3, 3), (1, 3), (1, 4), (2, 6)])
def test_any_number_of_chunks(num_ranks: int, num_stages: int) -> None:
    expected, actual = mixed_model(), mixed_model()
    with Pipeline(
        actual,
        X[:2],
        loss_fn=functional.cross_entropy,
        devices=["cpu"] * num_ranks,
        num_stages=num_stages,
        schedule="interleaved-1f1b",
        num_microbatches=5,
        boundaries=even_boundaries(11, num_stages),
        seed=4,
    ) as pipe:
        compare_step(pipe, expected, X, target=Y, seed=4)


class Twice(nn.Module):
    """Gives one tensor out twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (y := x * 3), y


class Doubles(nn.Module):
    """Modifies the first of two inputs that are one tensor."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        first, second = pair
        return first.mul_(2) + second


class Remembers(nn.Module):
    """Gives out a buffer that it updates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x, self.mean


class Adds(nn.Module):
    """The sum of a tuple."""

    def forward(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return sum(values[1:], values[0])


class Force(nn.Module):
    """Differentiates inside its own forward, as force fields and score models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = self.b(torch.tanh(self.a(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0] + self.b(x)


class Thrice(nn.Module):
    """One weight in three products."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(torch.tanh(self.a(torch.tanh(self.a(x)))))


class Complex(nn.Module):
    """A product of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


STRANGE = {
    "one tensor twice": [Twice, Doubles],
    "one tensor twice, read only": [Twice, Adds],
    "a buffer that is updated": [Remembers, Adds],
    "a layer that differentiates": [Force, nn.Identity],
    "one weight three times": [Thrice, nn.Identity],
    "complex numbers": [Complex, nn.Identity],
}


@pytest.mark.one_in(24)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("layers", STRANGE)
def test_unusual_layers_train_with_the_bits_of_the_loop(layers: str, name: str, autocast: bool) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        first, second = (layer() for layer in STRANGE[layers])
        return nn.Sequential(nn.Linear(8, 8), first, second, nn.Linear(8, 4))

    expected, actual = build(), build()
    devices = ["cpu"] * (4 // schedules.get(name).chunks_per_rank)
    for mode in ("never", "always") if layers != "a layer that differentiates" else ("never",):
        with (
            torch.autocast("cpu", enabled=autocast),
            Pipeline(
                actual,
                X[:2],
                loss_fn=functional.cross_entropy,
                devices=devices,
                schedule=name,
                num_microbatches=5,
                boundaries=[1, 2, 3],
                checkpoint=mode,
                seed=1,
            ) as pipe,
        ):
            for step in range(2):
                compare_step(pipe, expected, X, target=Y, seed=1, step=step)


@pytest.mark.parametrize("name", KINDS)
def test_a_micro_batch_that_counts_nothing_changes_nothing(name: str) -> None:
    """Its loss may be no number at all, as a mean over nothing is."""

    def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, ignore_index=0)

    target = Y.clone().clamp(min=1)
    target[:4] = 0  # all of micro-batch 0
    expected, actual = plain_model().eval(), plain_model().eval()
    masked(expected(X), target).backward()
    stages = 2 * schedules.get(name).chunks_per_rank
    with Pipeline(
        actual,
        X[:2],
        loss_fn=masked,
        devices=["cpu"] * 2,
        schedule=name,
        num_microbatches=5,
        boundaries=even_boundaries(9, stages),
        numerics=Numerics(loss_weight=lambda target: (target != 0).sum()),
    ) as pipe:
        torch.testing.assert_close(pipe.eval().step(X, target=target), masked(expected(X), target).detach())
    for name_, grad in gradients(expected).items():
        torch.testing.assert_close(gradients(actual)[name_], grad)


def test_time_first_tensors_are_split_along_dim_1() -> None:
    """Inputs, target and outputs of (time, rows, ...)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(5, 6, 8), torch.randn(5, 6, 3)
    with Pipeline(
        model,
        x[:, :2],
        loss_fn=functional.mse_loss,
        devices=["cpu"] * 2,
        num_microbatches=3,
        numerics=Numerics(split_dims=1),
        schedule="1f1b",
    ) as pipe:
        loss, outputs = pipe.step(x, target=y, return_outputs=True)
        torch.testing.assert_close(outputs, model(x))
        torch.testing.assert_close(loss, functional.mse_loss(model(x), y))
        expected = {name: grad.clone() for name, grad in gradients(model).items()}
        pipe.zero_grad()
        functional.mse_loss(pipe(x), y).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name])


class Part(nn.Module):
    """Gives out a tensor and a view of it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (y := x * 3), y[:, :]


def test_a_view_beside_its_base_that_is_modified_by_the_next_stage_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Part(), Doubles(), nn.Linear(8, 4))
    options = {"loss_fn": functional.cross_entropy, "devices": ["cpu"] * 2, "num_microbatches": 4}
    refused = pytest.raises(ExecutionError, match=r"tensors that share memory.*clone the tensor")
    with Pipeline(model, X[:2], boundaries=[2], **options) as pipe, refused:
        pipe.step(X, target=Y)
    with Pipeline(model, X[:2], boundaries=[1], **options) as pipe:
        assert pipe.step(X, target=Y).isfinite()
