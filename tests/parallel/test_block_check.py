"""Code between divided layers that needs whole activations is refused, and code that serves blocks is not."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched.errors import InputError
from pipesched.parallel import block_check as module
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.block_check import BlockCheck
from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.layer_styles import Column, Heads, Row
from pipesched.parallel.styles import split_model, styles_of
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.simulation.tensor_layout import TensorLayout

WIDTH, HEADS = 16, 4
PAIR = {"up": "column", "down": "row"}
THREE = PAIR | {"up": Column(sections=3)}


class Calls(nn.Module):
    """Two linear layers, with a function between them."""

    def __init__(self, between: Callable[..., Tensor], parts: int = 1, **layers: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, parts * 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.between, self.num_heads = between, HEADS
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.between(self, self.up(x)))
        return y


def attention(own: Any, h: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (own.num_heads, -1)).transpose(1, 2) for part in h.chunk(3, -1))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def interleaved(own: Any, h: Tensor) -> Tensor:
    """Attention. The columns of its weight are ordered by head, and then by query, key and value."""
    q, k, v = h.unflatten(-1, (own.num_heads, 3, -1)).transpose(1, 2).unbind(3)
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def normed_heads(own: Any, h: Tensor) -> Tensor:
    heads = h.unflatten(-1, (own.num_heads, -1))
    return functional.layer_norm(heads, heads.shape[-1:]).flatten(-2)


def check(model: nn.Module, styles: Any, x: Tensor, *, rank: int = 1, layout: str = "1d", logits: bool = False) -> bool:
    """Return whether the runs of the model showed something."""
    layouts = {"1d": TensorLayout.of("1d", 2), "2d": TensorLayout.of("2d", 4), "3d": TensorLayout.of("3d", 8)}
    group = TensorGroup.counting(layouts[layout].size, rank)
    if layout != "1d":
        AxisGroups(group, layouts[layout])
    made = BlockCheck.of_whole(model, styles_of(model, styles, group.size), ((x,), {}))
    split = split_model(model, styles, group)
    if made is not None:
        made.compare(split, group, ((x,), {}), takes_logits=logits)
    return made is not None


def check_ranks(model: nn.Module, styles: Any, x: Tensor) -> None:
    for rank in range(2):
        check(copy.deepcopy(model), styles, x, rank=rank)


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 6, WIDTH, dtype=dtype)


#: Code that joins columns of several ranks, or computes with their number.
WRONG: dict[str, Callable[..., Any]] = {
    "softmax": lambda own, h: h.softmax(-1),
    "mean": lambda own, h: h - h.mean(-1, keepdim=True),
    "norm": lambda own, h: functional.layer_norm(h, h.shape[-1:]),
    "a scale by the size": lambda own, h: h / math.sqrt(h.shape[-1]),
    "a vector of another size": lambda own, h: h * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype),
    "order": lambda own, h: h.flip(-1),
    "sums": lambda own, h: h.cumsum(-1),
    "the largest": lambda own, h: h / h.abs().amax(),
    "a mask of the largest": lambda own, h: h * (h >= h.topk(2).values[..., -1:]),
    "heads that are counted by hand": normed_heads,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WRONG)
def test_code_that_joins_columns_is_refused(name: str, dtype: torch.dtype) -> None:
    """On one of the ranks at least."""
    model = Calls(WRONG[name]).to(dtype)
    with pytest.raises(InputError, match=r"the input of 'down', after 'up', differs by \d+\.\d% from this block"):
        check_ranks(model, PAIR, batch(dtype))


@pytest.mark.parametrize(
    ("between", "parts", "styles", "words"),
    [
        (attention, 3, THREE, "the code, after 'up', raised|the input of 'down', after 'up', differs"),
        (attention, 3, PAIR | {"": Heads("num_heads")}, "the input of 'down', after 'up', differs"),
        (lambda own, h: functional.glu(h), 2, PAIR, "the input of 'down', after 'up', differs"),
        (lambda own, h: h[..., : 2 * WIDTH], 2, PAIR, r"has the shape \[4, 6, 32\] on rank 1 of 2, and the block"),
        (lambda own, h: h + torch.zeros(2 * WIDTH), 1, PAIR, "the code, after 'up', raised RuntimeError"),
    ],
)
def test_parts_and_heads_that_have_no_style_are_refused(between: Any, parts: int, styles: Any, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        check(Calls(between, parts), styles, batch())
    assert "Column(sections=...)" in str(caught.value)


#: Code that gives each rank its block, with the number of parts and the styles.
RIGHT: dict[str, tuple[Any, int, Any]] = {
    "activation": (lambda own, h: functional.gelu(h), 1, PAIR),
    "softmax over positions": (lambda own, h: h.softmax(1), 1, PAIR),
    "dropout": (lambda own, h: functional.dropout(h, 0.5, own.training), 1, PAIR),
    "gate": (lambda own, h: functional.glu(h), 2, PAIR | {"up": Column(sections=2)}),
    "attention": (attention, 3, THREE | {"": Heads("num_heads")}),
    "interleaved attention": (interleaved, 3, PAIR | {"": Heads("num_heads")}),
    "norm of heads": (normed_heads, 1, PAIR | {"": Heads("num_heads")}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RIGHT)
def test_code_that_serves_blocks_is_not_refused(name: str, dtype: torch.dtype) -> None:
    between, parts, styles = RIGHT[name]
    model = Calls(between, parts).to(dtype)
    before = copy.deepcopy(model.state_dict())
    assert check(model, styles, batch(dtype))
    assert model.training
    assert {name: tensor.shape for name, tensor in model.state_dict().items()}.keys() == before.keys()


def test_a_module_of_torch_is_not_refused() -> None:
    block = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    assert check(nn.Sequential(block, Calls(WRONG["mean"])), {"0": "block"}, batch())


def test_positions_that_code_joins_are_refused() -> None:
    """Between a layer that divides positions and one that gathers them."""
    styles = {"*.up": Column(sequence=True), "*.down": Row(sequence=True), "begin": "sequence-begin"}

    class Model(nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.begin, self.one, self.other = nn.Identity(), *(Calls(lambda own, h: h.relu()) for _ in range(2))
            self.end, self.shift = nn.Identity(), shift

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.end(self.other(self.one(self.begin(x)).roll(self.shift, 1)))
            return y

    ends = {"end": "sequence-end"}
    assert check(Model(0), styles | ends, batch())
    with pytest.raises(InputError, match=r"the input of 'other.up' differs by .* joins positions of several ranks"):
        check(Model(1), styles | ends, batch())


@pytest.mark.parametrize("layout", ["2d", "3d"])
def test_code_inside_a_pair_on_a_grid_is_refused(layout: str) -> None:
    styles = PAIR | {"begin": "begin", "end": "end"}

    class Model(Calls):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.end(super().forward(self.begin(x)))
            return y

    def model(between: Any) -> nn.Module:
        return Model(between, begin=nn.Identity(), end=nn.Identity())

    assert check(model(lambda own, h: h.relu()), styles, batch(), layout=layout)
    with pytest.raises(InputError, match="the input of 'down', after 'up', differs by"):
        check(model(WRONG["softmax"]), styles, batch(), layout=layout)


def test_divided_outputs_are_refused_unless_a_loss_takes_them() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 12))

    numbers = torch.arange(12).view(2, 6)
    with pytest.raises(InputError, match=r"has the shape \[2, 6, 6\] on each rank, and \[2, 6, 12\] as a whole"):
        check(model(), {"1": "column"}, numbers)
    assert check(model(), {"0": "vocabulary", "1": "column"}, numbers, logits=True)
    assert check(model(), {"0": "column-gathered", "1": "column-gathered"}, numbers)


def test_outputs_that_have_heads_are_not_refused() -> None:
    """Such as keys and values that transformers would use again."""

    class Model(Calls):
        def forward(self, x: Tensor) -> Any:
            keys = self.up(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            return self.down(keys.transpose(1, 2).flatten(2)), keys

    assert check(Model(lambda own, h: h), PAIR | {"": Heads("num_heads")}, batch())


def test_a_loss_inside_the_model_takes_divided_logits() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.loss = nn.Linear(WIDTH, 12), VocabularyCrossEntropy()

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.loss(self.head(x).flatten(0, 1), torch.arange(24) % 12)
            return loss

    assert check(Model(), {"head": "vocabulary"}, batch())


def test_a_layer_that_runs_twice_is_compared_in_both_calls() -> None:
    class Twice(Calls):
        def forward(self, x: Tensor) -> Tensor:
            first: Tensor = x + self.down(self.up(x).relu())
            return first + self.down(self.between(self, self.up(first)))

    assert check(Twice(lambda own, h: h.relu()), PAIR, batch())
    with pytest.raises(InputError, match="the input of 'down', after 'up', differs"):
        check(Twice(WRONG["mean"]), PAIR, batch())


@pytest.mark.parametrize("what", ["random", "error"])
def test_a_run_that_shows_nothing_is_left_out(what: str) -> None:
    def between(own: Any, h: Tensor) -> Tensor:
        if what == "error" and not own.training:
            raise ValueError("no evaluation")
        return h + torch.randn_like(h) if what == "random" else h.softmax(-1)

    assert not check(Calls(between), PAIR, batch())


@pytest.mark.parametrize("name", [*WRONG, *RIGHT])
def test_models_on_the_meta_device_are_compared(name: str) -> None:
    between, parts, styles = (WRONG[name], 1, PAIR) if name in WRONG else RIGHT[name]
    with torch.device("meta"):
        model = Calls(between, parts)
    if name in WRONG:
        with pytest.raises(InputError, match="the input of 'down', after 'up', differs"):
            check_ranks(model, styles, batch())
    else:
        assert check(model, styles, batch())


def test_code_that_needs_values_computes_everything() -> None:
    class Counted(Calls):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 2 if float(y.sum()) > 0 else y

    assert check(Counted(lambda own, h: h.relu()), PAIR, batch())
    with pytest.raises(InputError, match="the input of 'down', after 'up', differs"):
        check(Counted(WRONG["mean"]), PAIR, batch())


def test_only_code_between_divided_layers_computes() -> None:
    """Other runs would not pass the assertions, and so show nothing."""

    def between(own: Any, h: Tensor) -> Tensor:
        assert h.isfinite().all()
        return h.relu()

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert x.is_meta
            return super().forward(x)

    model = nn.Sequential(Calls(between), Watched(WIDTH, WIDTH), Calls(between))
    assert check(model, {"*.up": "column", "*.down": "row"}, batch())


def test_of_many_layers_those_of_one_kind_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_VALUES", 0)
    styles = {"*.up": "column", "*.down": "row"}

    def model(act: type[nn.Module]) -> nn.Module:
        return nn.Sequential(Calls(lambda own, h: h.relu()), *(Acts(act()) for act in (nn.ReLU, nn.ReLU, act)))

    class Acts(Calls):
        def __init__(self, act: nn.Module) -> None:
            super().__init__(lambda own, h: own.act(h), act=act)

    assert check(model(nn.GELU), styles, batch())
    with pytest.raises(InputError, match=r"the input of '3\.down', after '3\.up', differs"):
        check(model(lambda: nn.Softmax(-1)), styles, batch())


def test_state_and_random_numbers_stay_as_they_are() -> None:
    class Counting(Calls):
        def __init__(self) -> None:
            super().__init__(lambda own, h: functional.dropout(h, 0.5, own.training))
            self.register_buffer("calls", torch.zeros(()))
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(len(x))
            return super().forward(x)

    model, x = Counting(), batch()
    up, down, state = model.up.weight.detach().clone(), model.down.weight.detach().clone(), torch.get_rng_state()
    assert check(model, PAIR, x)
    assert (model.calls, model.seen, model.training) == (0, [], True)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.up.weight, up.chunk(2)[1])
    assert torch.equal(model.down.weight, down.chunk(2, 1)[1])
    assert not model.up._forward_hooks
    assert model.up.weight.grad is None
