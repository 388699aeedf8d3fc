"""Odd models: each trains like the reference loop, to the bit, or raises an error that says what is wrong."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipesched import Pipeline
from pipesched.errors import GraphError, ModelTypeError, PartitionError
from pipesched.program.checkpoint_options import CheckpointMode
from pipesched.testing import reference_step
from tests.support.models import every_product_deferred
from tests.support.odd_models import FLOATS, Block, Blocks, check, made, square

__all__ = ["every_product_deferred"]  # a fixture

pytestmark = pytest.mark.usefixtures("every_product_deferred")


class MaskedLate(nn.Module):
    """The code asks for the shape of a mask that only the last blocks use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = mask.to(torch.bool)
        if hidden.shape[-1] < x.shape[-1]:
            hidden = torch.cat([hidden, hidden], -1)
        for number, block in enumerate(self.blocks):
            x = block(x) if number < 5 else block(x).masked_fill(hidden, 0.0)
        return x


def test_the_shape_of_what_a_later_stage_uses() -> None:
    check(MaskedLate, FLOATS, (FLOATS > 0).long())


class Remembering(nn.Module):
    """A layer that stores plain attributes, and replaces a buffer by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count, self.seen = nn.Linear(8, 8), 0, []
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(len(x))
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.inner(x - self.mean) * self.count


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_layers_that_remember() -> None:
    model = Remembers()
    Pipeline(model, FLOATS[:2], devices=["cpu"] * 3, loss_fn=square, schedule="1f1b").close()  # captures, and measures
    assert [(block.count, block.seen, block.mean.tolist()) for block in model.blocks] == [(0, [], [0.0] * 8)] * 4
    check(Remembers, FLOATS)


class OnlyTrains(nn.Module):
    """Fails in evaluation mode, like a detector without targets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("only in training")
        for block in self.blocks:
            x = block(x)
        return x


def test_a_model_that_runs_in_one_mode() -> None:
    own, plain = made(OnlyTrains), made(OnlyTrains)
    with Pipeline(
        own, FLOATS[:2], devices=["cpu"] * 3, loss_fn=square, num_microbatches=4, seed=5, schedule="1f1b"
    ) as pipe:
        due = reference_step(plain, FLOATS, target=FLOATS, loss_fn=square, num_microbatches=4, seed=5)
        assert torch.equal(pipe.step(FLOATS, target=FLOATS), due)
        pipe.eval()
        with pytest.raises(
            GraphError,
            match="captured; with training=False, the model calls different layers for the sample, or fails",
        ) as caught:
            pipe.evaluate(FLOATS, target=FLOATS)
        assert "only in training" in str(caught.value.__cause__)


class Told(nn.Module):
    """Stores a tensor in an object, and reads the tensor that the layer before stored there, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.scale = nn.Linear(8, 8), nn.Dropout(0.1), None

    def forward(self, x: Tensor, kept: SimpleNamespace) -> Tensor:
        y = self.drop(self.inner(x)) * self.scale
        x, kept.last = x + y * kept.last, y
        return x


class Tells(nn.Module):
    """Layers that pass each other tensors through objects, in pairs, and get an attribute set by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.first = nn.ModuleList(Told() for _ in range(6)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.first(x).sigmoid()
        for number, block in enumerate(self.blocks):
            if number % 2 == 0:
                kept = SimpleNamespace(last=1.0)
            block.scale = scale
            x = block(x, kept)
        return x


def test_layers_that_hand_things_on_stay_together() -> None:
    check(Tells, FLOATS)
    with pytest.raises(
        GraphError,
        match=r"in one stage; blocks\.0 passes .* the model has only \d layers .*, too few for 5 stages; return",
    ):
        Pipeline(Tells(), FLOATS[:2], devices=["cpu"] * 5, schedule="1f1b", loss_fn=square)


class Silent(nn.Module):
    """Returns nothing."""

    def forward(self, x: Tensor) -> None:
        self.seen = tuple(x.shape)


class InPlace(nn.Module):
    """Writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.add_(1))


class Mixed(nn.Module):
    """A layer that returns nothing, a layer that writes to an input used again, one without parameters, and parameters
    and a layer that nothing uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.silent, self.relu, self.second = nn.Linear(8, 8), Silent(), nn.ReLU(), nn.Linear(8, 8)
        self.writes, self.last = InPlace(), nn.Linear(8, 8)
        self.unused, self.spare = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.silent(x)
        x = self.second(self.relu(x)) * 1
        return self.last(self.writes(x) + x)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize(
    "boundaries", [["silent", "relu"], ["relu", "second"], ["second", "writes"], ["writes", "last"]]
)
def test_what_a_stage_may_begin_with(boundaries: list[str], checkpoint: CheckpointMode) -> None:
    check(Mixed, FLOATS, boundaries=boundaries, checkpoint=checkpoint, schedules=["1f1b"])


class Row(nn.Module):
    """Linear layers, so that plain PyTorch gives the same loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))


class Adds(Row):
    """Changes its input, which all layers use."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.add_(1)
        for layer in self.layers:
            h = layer(h) + x
        return h


class Asks(Row):
    """At the end, queries whether an early tensor requires a gradient, and its strides."""

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.layers[0](x).t().contiguous().t()
        for layer in self.layers[1:]:
            h = layer(h)
        return h * (2 if first.requires_grad else 3) * (5 if first.is_contiguous() else 7)


class Stores(nn.Linear):
    """Stores its output in an attribute that another layer reads."""

    def __init__(self, store: dict[str, Tensor]) -> None:
        super().__init__(8, 8)
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        self.store["seen"] = super().forward(x)
        return self.store["seen"]


class Finds(Stores):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.store["seen"].detach()


class Stored(Row):
    def __init__(self) -> None:
        super().__init__()
        store: dict[str, Tensor] = {}
        self.layers[1], self.layers[3] = Stores(store), Finds(store)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Recomputes(Row):
    """torch.utils.checkpoint over pairs of layers; no stage may begin between the two."""

    def forward(self, x: Tensor) -> Tensor:
        for first in (0, 2, 4):
            pair = self.layers[first : first + 2]
            x = x + checkpoint(lambda h, pair=pair: pair[1](pair[0](h).tanh()), x, use_reentrant=False)
        return x


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [Adds, Asks, Stored, Recomputes])
def test_the_pipeline_and_the_reference_give_the_loss_of_plain_pytorch(kind: type[nn.Module]) -> None:
    x, target = torch.randn(8, 8), torch.ones(8, 8)
    due = square(made(kind)(x.clone()), target)
    options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "seed": 5}
    torch.testing.assert_close(reference_step(made(kind), x.clone(), target=target, **options), due.detach())
    with Pipeline(made(kind), x[:2], devices=["cpu"] * 3, **options) as pipe:
        torch.testing.assert_close(pipe.step(x.clone(), target=target), due.detach())


def test_no_stage_begins_within_what_is_recomputed_as_one() -> None:
    with pytest.raises(PartitionError, match=r"got 'layers\.3'; the layers are layers\.0, layers\.2"):
        Pipeline(Recomputes(), FLOATS[:2], loss_fn=square, devices=["cpu"] * 2, boundaries=["layers.3"])


class Remembered(Row):
    """Changes a tensor that is no input, buffer or result of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.mean.mul_(0.9).add_(x.detach().mean(0))


class Unbound(Row):
    """Returns one tensor per row."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        rows = x.unbind(0)
        for layer in self.layers[1:]:
            x = layer(x)
        return x + torch.stack(rows).mean(0)


class Measures(Row):
    """Queries a shape that the sample's forward does not query."""

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(h)
        return h * (h.shape[1] if len(x) == 2 else first.shape[1])


def test_a_change_of_a_tensor_without_a_name_is_an_error() -> None:
    with pytest.raises(
        GraphError, match=r"mul_ changes a tensor of shape \(8,\) that is none of these; register the tensor"
    ):
        Pipeline(Remembered(), FLOATS[:2], loss_fn=square, devices=["cpu"] * 3, schedule="1f1b")


@pytest.mark.parametrize("kind", [Unbound, Measures])
def test_code_that_follows_the_number_of_rows(kind: type[nn.Module]) -> None:
    options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "seed": 5}
    x, target = torch.randn(12, 8), torch.zeros(12, 8)
    own, plain = made(kind), made(kind)
    with Pipeline(own, FLOATS[:2], devices=["cpu"] * 3, schedule="1f1b", **options) as pipe:
        assert torch.equal(pipe.step(x, target=target), reference_step(plain, x, target=target, **options))
        expected = dict(plain.named_parameters())
        assert all(torch.equal(own.grad, expected[name].grad) for name, own in pipe.named_parameters())


class Bare(nn.Module):
    """No layers at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.2, self.training)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 8), Bare, lambda: nn.Sequential(nn.Linear(8, 8))])
def test_a_model_of_one_layer_has_one_stage(make: Callable[[], nn.Module]) -> None:
    check(make, FLOATS, stages=1)
    with Pipeline(make(), FLOATS[:2], devices=["cpu"] * 2, loss_fn=square) as pipe:
        assert pipe.num_stages == 1  # the other device is left out
    with pytest.raises(PartitionError, match="the model has 1 layer"):
        Pipeline(make(), FLOATS[:2], devices=["cpu"] * 2, loss_fn=square, schedule="1f1b")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
def test_a_list_of_stages(kind: Callable[[list[nn.Module]], Any]) -> None:
    def make() -> Any:
        return kind([nn.Sequential(Block(), Block(), Block()), Block(), nn.Sequential(Block())])

    check(make, FLOATS)
    with Pipeline(make(), FLOATS[:2], devices=["cpu"] * 3, loss_fn=square, schedule="1f1b") as pipe:
        assert pipe.boundaries == ["1", "2.0"]
    with Pipeline(make(), FLOATS[:2], devices=["cpu"] * 2, schedule="1f1b", loss_fn=square) as pipe:
        assert pipe.num_stages == 2
    with pytest.raises(ModelTypeError, match=r"or a list of nn\.Modules; the list contains an object of type int;"):
        Pipeline(kind([Block(), 3]) if kind is not nn.ModuleList else [3], FLOATS[:2])


def test_hooks_on_the_models_backward_are_an_error() -> None:
    model = Blocks()
    model.register_full_backward_hook(lambda module, given, taken: None)
    with pytest.raises(GraphError, match="the model has 1 backward hook that would never run"):
        Pipeline(model, FLOATS[:2], devices=["cpu"] * 2, loss_fn=square, schedule="1f1b")
