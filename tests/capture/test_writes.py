"""Writes in place between layers: wherever the model is cut, losses and gradients are those of the plain loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched import Pipeline
from pipesched.errors import PartitionError
from pipesched.testing import reference_step
from tests.support import places
from tests.support.jobs import giant
from tests.support.models import assert_as
from tests.support.odd_models import made, square, state

ROWS, WIDTH = 4, 4
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Linear):
    """A layer with a buffer, which the layer itself, or code between layers, writes to."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.counts = False

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.scale.add_(1)
        return super().forward(x) + self.scale


class Writes(nn.Module):
    """Four layers, and code between them that writes to tensors."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (Scaled() for _ in range(4))
        self.register_buffer("count", torch.ones(2, WIDTH))


Code = Callable[[Writes, Tensor], Tensor]
CODES: dict[str, Code] = {}


def case(code: Code) -> Code:
    CODES[code.__name__] = code
    return code


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, device=x.device)


@case
def slice_of_zeros(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x)
    kept = zeros(y)
    kept[:] = y
    return m.d(m.c(m.b(kept)))


@case
def slices_of_several_layers(m: Writes, x: Tensor) -> Tensor:
    kept = torch.zeros(4, *x.shape)
    kept[0] = x = m.a(x)
    kept[1] = x = m.b(x)
    kept[2] = x = m.c(x)
    kept[3] = m.d(x)
    return kept.sum(0)


@case
def copy_(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x)
    kept = torch.empty_like(x).copy_(y)
    return m.d(m.c(m.b(y) + kept)) + kept


@case
def add_(m: Writes, x: Tensor) -> Tensor:
    total = zeros(x)
    for layer in (m.a, m.b, m.c, m.d):
        x = layer(x)
        total.add_(x)
    return total


@case
def augmented(m: Writes, x: Tensor) -> Tensor:
    x = m.b(m.a(x))
    x += 1
    x *= m.c(x + 0)
    return m.d(x)


@case
def index_put_(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x)
    kept = zeros(y)
    kept.index_put_((torch.arange(len(y)).flip(0),), y)
    return m.d(kept * m.c(m.b(y)))


@case
def masked_fill_(m: Writes, x: Tensor) -> Tensor:
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[:] = m.a(x) > 0
    y = m.b(x).masked_fill_(mask, 0.5)
    return m.d(m.c(y).masked_fill(mask, 0.25))


@case
def chain_of_views(m: Writes, x: Tensor) -> Tensor:
    kept = torch.zeros(2, *x.shape)
    kept[1].t()[1:].t().copy_(m.a(x)[:, 1:])
    return m.d(m.c(m.b(kept[1]))) + kept[1]


@case
def base_read(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x) * 1
    first = y[:, 0]
    first.zero_()
    z = m.c(m.b(y))
    return m.d(z + y)


@case
def base_read_of_zeros(m: Writes, x: Tensor) -> Tensor:
    kept = zeros(x)
    view = kept[:, 1:]
    view.copy_(m.a(x)[:, 1:])
    return m.d(m.c(m.b(x)) + kept) * kept


@case
def view_read(m: Writes, x: Tensor) -> Tensor:
    kept = zeros(x)
    view = kept[:, 1]
    kept[:] = m.a(x)
    return m.d(m.c(m.b(x)) + view[:, None])


@case
def view_returned(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x) * 1
    view = y[:, :]
    z = m.b(x)
    y.mul_(z)
    m.d(m.c(x))
    return view


@case
def view_returned_after_the_last_call(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x) * 1
    view = y[:, :]
    y.mul_(m.d(m.c(m.b(x))))
    return view


@case
def read_before(m: Writes, x: Tensor) -> Tensor:
    kept = zeros(x)
    before = kept + 1
    kept[:] = m.a(x)
    return m.d(m.c(m.b(kept)) * before)


@case
def earlier_tensor(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x) * 1
    z = m.b(x)
    y.add_(z)
    w = m.c(y + 0)
    y.mul_(2)
    return m.d(w) + y


@case
def written_later(m: Writes, x: Tensor) -> Tensor:
    kept = zeros(x)
    y = m.b(m.a(x) + kept)
    kept[:] = y
    return m.d(m.c(kept)) + kept


@case
def written_twice(m: Writes, x: Tensor) -> Tensor:
    kept = zeros(x)
    kept.fill_(2)
    kept[:, 0] = m.a(x)[:, 0]
    y = m.b(kept + 0)
    kept[:, 1] = y[:, 1]
    return m.d(m.c(kept))


@case
def out(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x)
    kept = zeros(y)
    with torch.no_grad():
        torch.mul(y, 2, out=kept)
    return m.d(m.c(m.b(y)) + kept)


@case
def out_to_a_view(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x)
    kept = zeros(y)
    view = kept[1:]
    with torch.no_grad():
        torch.mul(y[1:], 2, out=view)
    return m.d(m.c(m.b(y)) + kept)


@case
def without_gradients(m: Writes, x: Tensor) -> Tensor:
    kept = zeros(x)
    with torch.no_grad():
        kept[:, 1:].add_(m.a(x)[:, 1:])
    return m.d(m.c(m.b(x)) * kept)


@case
def data(m: Writes, x: Tensor) -> Tensor:
    kept = zeros(x)
    kept.data[:] = m.a(x).detach()
    return m.d(m.c(m.b(x)) * kept)


@case
def mask_by_views(m: Writes, x: Tensor) -> Tensor:
    mask = torch.zeros(WIDTH, WIDTH)
    mask.diagonal().fill_(2)
    rows = mask[1:]
    mask[2] = 3
    return m.d(m.c(m.b(m.a(x)) @ mask)) @ mask + rows.sum(0)


@case
def input_written(m: Writes, x: Tensor) -> Tensor:
    positive = x > 0
    y = m.a(x + 0)
    x = x.mul_(2)
    return m.d(m.c(m.b(y + x)) * positive) + x


@case
def input_written_by_a_view(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x + 0)
    x[:, 1:].zero_()
    return m.d(m.b(y) + x) + m.c(y)


@case
def view_of_a_written_input(m: Writes, x: Tensor) -> Tensor:
    view = x[:, 1:]
    view2 = functional.pad(view, (1, 0))
    x.add_(1)
    y = m.b(m.a(x + view2))
    return m.d(m.c(y) + view.sum())


@case
def buffer_written_by_a_view(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x)
    m.count[1].add_(1)
    z = m.b(y)
    return m.d(m.c(z) * m.count[1]) + m.count.sum()


@case
def view_of_a_written_buffer(m: Writes, x: Tensor) -> Tensor:
    row = m.count[1]
    y = m.b(m.a(x))
    m.count.add_(1)
    return m.d(m.c(y)) + row


@case
def alias_of_an_unused_result(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x).contiguous()
    z = y.contiguous()
    z.add_(1)
    return m.d(m.c(m.b(y)) + y)


@case
def layer_buffer_written_after_the_layer(m: Writes, x: Tensor) -> Tensor:
    x = m.c(m.b(m.a(x)))
    m.b.scale.add_(x.detach().mean(0))
    return m.d(x)


@case
def layer_buffer_written_before_the_layer(m: Writes, x: Tensor) -> Tensor:
    y = m.a(x)
    m.c.scale[1:].add_(y.detach().mean())
    return m.d(m.c(m.b(y)))


@case
def layer_buffer_read_after_the_layer(m: Writes, x: Tensor) -> Tensor:
    m.a.counts = True
    y = m.c(m.b(m.a(x)))
    y = y * m.a.scale.sum()
    return m.d(y)


LAYERS = ["a", "b", "c", "d"]
CUTS = [["b"], ["c"], ["d"], ["b", "d"], ["b", "c", "d"]]


#: The cuts of models in which a write and the calls that see it must share a stage.
TOGETHER = {
    "view_returned_after_the_last_call": [["b"]],
    "input_written_by_a_view": [["c"], ["d"]],
    "buffer_written_by_a_view": [["b"]],
    "view_of_a_written_buffer": [["c"], ["d"]],
    "layer_buffer_written_after_the_layer": [["b"], ["d"], ["b", "d"]],
    "layer_buffer_written_before_the_layer": [["b"], ["d"], ["b", "d"]],
    "layer_buffer_read_after_the_layer": [["d"]],
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CODES)
def test_a_write_reaches_every_stage(name: str) -> None:
    model = type(name, (Writes,), {"forward": CODES[name]})
    options = {"loss_fn": square, "num_microbatches": 2, "seed": 5}
    plain = made(model)
    dues = [
        reference_step(plain, X.clone(), target=torch.ones(ROWS, WIDTH), step=step, **options).clone()
        for step in range(2)
    ]
    expected = state(plain)
    possible = []
    for cut in CUTS:
        own = made(model)
        try:
            pipe = Pipeline(
                own,
                X[:2],
                devices=["cpu"] * (len(cut) + 1),
                boundaries=cut,
                schedule="1f1b",
                checkpoint="always" if len(cut) == 2 else "never",
                **options,
            )
        except PartitionError:  # the write and its readers must share a stage
            continue
        possible.append(cut)
        with pipe:
            for step, due in enumerate(dues):
                assert torch.equal(pipe.step(X.clone(), target=torch.ones(ROWS, WIDTH)), due), (cut, step)
        for key, value in state(own).items():
            assert (value is None) == (expected[key] is None), (cut, key)
            assert value is None or torch.equal(value, expected[key]), (cut, key)
    assert possible == TOGETHER.get(name, CUTS)


def written_early(group: places.Group) -> None:
    """The model's code fills a tensor before the first block, at which the second stage begins."""
    model, plain = giant.real_gpt(), giant.real_gpt()
    due = reference_step(plain, text=giant.TEXT, labels=giant.LABELS, num_microbatches=4, seed=3)
    with giant.gpt_pipeline(model, schedule="1f1b", boundaries=[1], **places.place(group)) as pipe:
        assert torch.equal(pipe.step(text=giant.TEXT, labels=giant.LABELS), due)
        assert_as(pipe, plain)


@pytest.mark.one_in(2)
def test_writes_before_the_first_block_train_over_two_ranks(run: places.Run) -> None:
    run(2, written_early)
