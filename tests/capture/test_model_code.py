"""Unusual code in models: each model trains like the reference loop, to the bit, or raises an error with a remedy."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipesched import Pipeline, graph_of, profile
from pipesched.errors import GraphError, InputError, ModelTypeError
from pipesched.tensors.row_evidence import Evidence
from pipesched.tensors.row_join import OutputRows
from pipesched.tensors.row_split import RowSplit
from pipesched.tensors.rows import Argument, Dim
from pipesched.testing import reference_step
from tests.support.models import every_product_deferred
from tests.support.odd_models import FLOATS, Block, Blocks, check, square

__all__ = ["every_product_deferred"]  # a fixture

pytestmark = [pytest.mark.usefixtures("every_product_deferred"), pytest.mark.timeout(120)]


class Recomputing(nn.Module):
    """A layer that recomputes a part of itself, by torch's own checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + checkpoint(self.inner, x, use_reentrant=False))


class RecomputingBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recomputing() for _ in range(6))


def test_layers_that_recompute_a_part_of_themselves_have_their_weight_gradients_deferred() -> None:
    check(RecomputingBlocks, FLOATS)
    check(RecomputingBlocks, FLOATS, checkpoint="always", schedules=["zb-h1"])


class Cell(nn.Module):
    """A part of a layer that continues from its stored state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state = nn.Linear(8, 8), None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.inner(x) if self.state is None else self.inner(x) + self.state
        return self.state


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop = Cell(), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.cell(x))


class BeginsAnew(Blocks):
    """Resets the states of its blocks before it runs them, as recurrent language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stateful() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.cell.state = None
        return super().forward(x)


def test_states_that_a_model_puts_back_before_each_forward() -> None:
    check(BeginsAnew, FLOATS)


class Caching(nn.Module):
    """Holds memory while its input exists."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.seen: Any = weakref.WeakKeyDictionary()

    def forward(self, x: Tensor) -> Tensor:
        self.seen[x] = torch.zeros(100_000)
        return self.inner(x)


def test_memory_that_goes_with_an_input_is_not_counted_below_zero() -> None:
    model = nn.Sequential(Caching(), Block(), Block())
    graph = graph_of(model, FLOATS)
    assert all(size >= 0 for _, node in graph.nodes(data=True) for key, size in node.items() if key.endswith("bytes"))
    with Pipeline(model, FLOATS[:2], devices=["cpu"] * 2, schedule="1f1b", loss_fn=square) as pipe:
        pipe.step(FLOATS, target=FLOATS)


class Compares(nn.Module):
    """Compares the box found in each row with the row's own boxes, whose number varies."""

    def forward(self, found: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
        losses = [(label["boxes"] - box).pow(2).mean() for box, label in zip(found, labels, strict=True)]
        return torch.stack(losses).mean()


class Detects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 4)
        self.criterion = Compares()

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]]) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return {"loss": self.criterion(x, labels), "found": x}


def boxes(*counts: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.full((count, 4), float(row)), "id": torch.tensor(row)} for row, count in enumerate(counts)]


def test_a_list_of_dicts_has_a_dict_a_row() -> None:
    labels = boxes(1, 2, 8, 4, 1, 1, 0 + 3, 2)
    options: dict[str, Any] = {"num_microbatches": 3, "seed": 5}
    model, plain = Detects(), Detects()
    plain.load_state_dict(model.state_dict())
    sample = {"x": FLOATS[:2], "labels": labels[:2]}
    with Pipeline(model, sample, devices=["cpu"] * 2, schedule="zb-h1", **options) as p:
        loss, output = p.step(x=FLOATS, labels=labels, return_outputs=True)
        assert output["found"].shape == (8, 4)
        with pytest.raises(InputError, match=r"labels= has 5"):
            p.step(x=FLOATS, labels=labels[:5])
    assert torch.equal(loss, reference_step(plain, x=FLOATS, labels=labels, **options))
    for own, due in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, due.grad)


def test_outputs_that_are_a_dict_a_row_are_gathered_in_the_order_of_rows() -> None:
    rows = boxes(1, 2, 3, 4, 5)
    parts = RowSplit.into(Evidence(), len(rows), 3).parts(Argument("target", {"all": rows}, Dim()))
    assert [[item["id"].item() for item in part["all"]] for part in parts] == [[0, 1], [2, 3], [4]]
    assert OutputRows().joined(parts, [2, 2, 1], Dim()) == {"all": rows}


class Pads(nn.Module):
    """Writes to pieces of a copy of its mask; the mask is an input and needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        padded = torch.zeros_like(mask)
        for own, row in zip(padded, mask, strict=True):
            own[:].copy_(row)
        return self.inner(x) * padded


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = Block(), nn.ModuleList(Pads() for _ in range(4)), Block()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x, mask)
        return self.last(x)


def test_only_what_needs_a_gradient_requires_one_where_a_layer_is_measured() -> None:
    check(Masked, FLOATS, FLOATS.abs())


@pytest.mark.filterwarnings("ignore:layer times must be measured on an idle", "ignore:layer times should add up")
def test_profiles_have_as_many_dicts_as_rows() -> None:
    found = profile(Detects(), {"x": FLOATS[:2], "labels": boxes(1, 2)}, rows=[2, 3])
    assert sorted(found.graphs) == [2, 3]


class Forces(nn.Module):
    """Returns the gradient of an energy with respect to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = at = x.detach().requires_grad_()
        for layer in self.layers:
            h = torch.tanh(layer(h))
        (force,) = torch.autograd.grad(h.sum(), at, create_graph=self.training)
        return x + force


class ForceField(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.forces, self.last = Block(), nn.ModuleList(Forces() for _ in range(3)), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for force in self.forces:
            with torch.enable_grad():
                x = force(x)
        return self.last(x)


def test_a_module_that_differentiates_its_layers_stays_in_one_piece() -> None:
    check(ForceField, FLOATS)
    assert "forces.1" in graph_of(ForceField(), FLOATS, measured=False)


def test_a_model_that_differentiates_across_all_layers_says_so() -> None:
    message = r"the model's own code calls grad after 3 layers \(layers\.0, layers\.1, .*into one submodule"
    with pytest.raises(GraphError, match=message):
        Pipeline(Forces(), FLOATS, devices=["cpu"] * 2, loss_fn=square)
    with pytest.raises(GraphError, match=message):
        reference_step(Forces(), FLOATS, loss_fn=square, target=FLOATS)


@pytest.mark.parametrize("kind", [nn.Sequential, lambda *layers: nn.ModuleList(layers)])
def test_lazy_modules_that_have_not_run_say_so(kind: Any) -> None:
    with pytest.raises(ModelTypeError, match=r"uninitialized: '0\.weight' and 3 more; call the"):
        Pipeline(kind(nn.LazyLinear(8), nn.LazyLinear(8)), FLOATS, devices=["cpu"] * 2, loss_fn=square)


class Listed(nn.Module):
    """A layer that calls its parts through a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self._parts = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        for part in self._parts:
            x = torch.tanh(part(x))
        return x


class Returns(nn.Module):
    """Calls one layer in several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.shared = nn.ModuleList(Block() for _ in range(3)), Listed()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.shared(block(x))
        return x


def test_a_layer_of_several_stages_may_call_its_parts_by_a_list() -> None:
    check(Returns, FLOATS, boundaries=["blocks.1.up", "blocks.2.up"])
