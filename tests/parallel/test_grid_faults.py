"""Grids of ranks refuse what they would compute wrongly, and give the numbers of one process otherwise."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipesched.errors import InputError
from pipesched.parallel.axis_groups import AxisGroups
from pipesched.parallel.cross_entropy import VocabularyCrossEntropy
from pipesched.parallel.layout_trace import LayoutTrace
from pipesched.parallel.styles import split_model
from pipesched.parallel.tensor_group import TensorGroup
from pipesched.simulation.tensor_layout import TensorLayout
from tests.support.divided_layers import CPU, DividedRandom, grouped, run, whole
from tests.support.jobs import grid_faults as jobs
from tests.support.rank_processes import Ranks

WIDTH, ROWS, LENGTH = 16, 8, 6


class Calls(nn.Module):
    """Calls a function of its layers and its input."""

    def __init__(self, call: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.begin, self.end = nn.Identity(), nn.Identity()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.call = call

    def forward(self, *args: Tensor) -> Any:
        return self.call(self, *args)


class Twice(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def pair() -> dict[str, nn.Module]:
    return {"up": linear(), "down": linear()}


ENDS = {"begin": "begin", "end": "end"}
PAIR = {"up": "column", "down": "row"}
#: A model, its styles, the layouts that refuse it, and words of the error.
WRONG: dict[str, tuple[Any, Any, str, list[str]]] = {
    "no begin": (
        lambda: Calls(lambda own, x: own.end(own.down(own.up(x))), **pair()),
        {"end": "end", **PAIR},
        "2d 3d",
        ["'up' gets activations of shape [8, 6, 16] that are whole", "'begin'"],
    ),
    "a pair of outputs": (
        lambda: Calls(lambda own, x: own.after(own.down(own.up(own.begin(x))))[0], after=Twice(), **pair()),
        {"begin": "begin", "after": "end", **PAIR},
        "2d 3d",
        ["'after' returns a tuple", "an nn.Identity for each tensor"],
    ),
    "two begins": (
        lambda: Calls(lambda own, x: own.end(own.down(own.up(own.other(own.begin(x))))), other=nn.Identity(), **pair()),
        {**ENDS, **PAIR, "other": "begin"},
        "2d 3d",
        ["'other' gets activations", "must get activations that are whole"],
    ),
    "two first layers": (
        lambda: Calls(lambda own, x: own.end(own.down(own.up(own.begin(x)))), **pair()),
        {**ENDS, "up": "column", "down": "column"},
        "3d",
        ["'down' gets activations of shape [2, 6, 8] that are blocks as inside a pair", "'row'"],
    ),
    "two second layers": (
        lambda: Calls(lambda own, x: own.end(own.down(own.up(own.begin(x)))), **pair()),
        {**ENDS, "up": "row", "down": "row"},
        "3d",
        ["'up' gets activations", "between pairs", "'column'"],
    ),
    "a norm inside a pair": (
        lambda: Calls(
            lambda own, x: own.end(own.down(own.norm(own.up(own.begin(x))))), norm=nn.LayerNorm(WIDTH), **pair()
        ),
        {**ENDS, **PAIR, "norm": "norm"},
        "3d",
        ["'norm' gets activations", "inside a pair"],
    ),
    "a residual sum over half a pair": (
        lambda: Calls(lambda own, x: own.end(own.down((y := own.begin(x)) + own.up(y))), **pair()),
        {**ENDS, **PAIR},
        "3d",
        ["'add' joins both, after 'up'"],
    ),
    "a residual sum around the blocks": (
        lambda: Calls(lambda own, x: own.end(x + own.down(own.up(own.begin(x)))), **pair()),
        {**ENDS, **PAIR},
        "2d 3d",
        ["'add' joins blocks", "with whole tensors of shape [8, 6, 16], after 'down'"],
    ),
    "a batch norm": (
        lambda: Calls(
            lambda own, x: own.end(own.down(own.up(own.norm(own.begin(x)).clone()))),
            norm=nn.BatchNorm1d(LENGTH, affine=False),
            **pair(),
        ),
        {**ENDS, **PAIR},
        "2d 3d",
        ["'batch_norm' computes with those of this rank only, after 'begin'"],
    ),
    "a mean over hidden units": (
        lambda: Calls(
            lambda own, x: own.end(own.down(own.up((y := own.begin(x)) - y.mean(-1, keepdim=True)))), **pair()
        ),
        {**ENDS, **PAIR},
        "2d 3d",
        ["'mean' computes", "'norm'"],
    ),
    "cross attention": (
        lambda: Calls(
            lambda own, x: own.end(own.heads(y := own.begin(x), y + 1, y + 1, need_weights=False)[0]),
            heads=nn.MultiheadAttention(WIDTH, 4, batch_first=True),
        ),
        {**ENDS, "heads": "heads"},
        "2d 3d",
        ["'heads' gets a query, a key and a value", "which are different tensors"],
    ),
    "a mask for each row": (
        lambda: Calls(
            lambda own, x: own.end(
                own.down(
                    functional.scaled_dot_product_attention(
                        *[own.up(own.begin(x)).unflatten(-1, (2, -1)).transpose(1, 2)] * 3,
                        x.new_zeros(ROWS, 1, LENGTH, LENGTH),
                    )
                    .transpose(1, 2)
                    .flatten(2)
                )
            ),
            **pair(),
        ),
        {**ENDS, **PAIR},
        "2d 3d",
        ["'scaled_dot_product_attention' joins blocks", "[8, 1, 6, 6]"],
    ),
    "a loss of whole logits": (
        lambda: Calls(
            lambda own, x: own.loss(own.end(own.down(own.up(own.begin(x)))).flatten(0, 1), torch.zeros(48).long()),
            loss=VocabularyCrossEntropy(),
            **pair(),
        ),
        {**ENDS, **PAIR},
        "2d 3d",
        ["logits whose classes are divided; it gets tensors of shape [48, 16] that are whole"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_layers_that_would_get_other_blocks_are_refused(what: str) -> None:
    make, styles, layouts, words = WRONG[what]
    for kind, size in (("2d", 4), ("3d", 8)):
        group = TensorGroup.counting(size)
        grid = AxisGroups(group, TensorLayout.of(kind, size))  # type: ignore[arg-type]
        model = make()
        split_model(model, styles, group)
        if kind not in layouts:
            with LayoutTrace(group):
                model(torch.randn(ROWS, LENGTH, WIDTH))
            continue
        with pytest.raises(InputError) as raised, LayoutTrace(group):
            model(torch.randn(ROWS, LENGTH, WIDTH))
        for word in words:
            assert word in str(raised.value)
        assert grid is group.grid


def test_a_pipeline_refuses_outputs_and_losses_that_do_not_fit_the_blocks(four: Ranks) -> None:
    for found in four.run(4, jobs.refused, timeout_s=60):
        assert "'1' gets activations of shape [8, 16] that are whole" in found["no begin"]
        assert "an output of shape [4, 8] is blocks as between pairs" in found["no end"]
        assert "it gets tensors of shape [8, 16] that are whole" in found["whole logits"]
        assert "it gets tensors of shape [8, 16] that are whole" in found["whole logits in one dimension"]
        assert not found["divided logits"]
        assert not found["divided logits in one dimension"]


@pytest.mark.parametrize("layout", ["1d", "2d"])
def test_an_entropy_of_divided_logits_counts_the_labels_of_all_micro_batches(four: Ranks, layout: str) -> None:
    for found, due in four.run(4, jobs.entropies, layout, timeout_s=60):
        assert found == pytest.approx(due, rel=1e-5)


@pytest.mark.parametrize("layout", ["1d", "2d"])
def test_metrics_and_users_get_whole_logits(four: Ranks, layout: str) -> None:
    for found, due in four.run(4, jobs.outputs, layout, timeout_s=60):
        for one, other in zip(found, due, strict=True):
            assert torch.allclose(one.to(other), other, rtol=1e-5, atol=1e-6)


def test_layers_may_share_a_dropout(four: Ranks) -> None:
    for found, due in four.run(4, jobs.shared, timeout_s=60):
        assert found == pytest.approx(due, rel=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("boundary", [1, 4])
def test_a_stage_may_begin_with_a_dropout(eight: Ranks, boundary: int) -> None:
    for found, due in eight.run(8, jobs.begun, boundary, timeout_s=60):
        assert found == pytest.approx(due, rel=1e-5)


def test_an_embedding_and_a_head_that_share_a_weight_are_refused_on_a_grid() -> None:
    group = TensorGroup.counting(4)
    grid = AxisGroups(group, TensorLayout.of("2d", 4))
    model = Calls(None, words=nn.Embedding(WIDTH, WIDTH), head=nn.Linear(WIDTH, WIDTH, bias=False))
    model.head.weight = model.words.weight
    with pytest.raises(InputError) as raised:
        split_model(model, {"words": "vocabulary", "head": "vocabulary"}, group)
    assert "'words.weight' and 'head.weight' are one weight; give each layer a weight of its own" in str(raised.value)
    assert grid is group.grid


def positions() -> Iterator[tuple[str, Any]]:
    rows = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 5
    yield "one row", lambda own, x: own.end(own.begin(x) + own.table(rows[0]))
    yield "all rows", lambda own, x: own.end(own.begin(x) + own.table(rows))
    yield "own rows", lambda own, x: own.end((y := own.begin(x)) + own.table(rows[:1].repeat(len(y), 1)))


@pytest.mark.parametrize("what", [name for name, _ in positions()])
def test_positions_may_have_a_row_for_each_sequence(four: Ranks, what: str) -> None:
    assert max(four.run(4, of_positions, what)) <= 1e-12


def of_positions(process_group: Any, what: str) -> float:
    torch.manual_seed(0)
    call = dict(positions())[what]
    model = Calls(call, table=nn.Embedding(LENGTH, WIDTH)).double()
    return difference(process_group, model, {**ENDS, "table": "heads"}, torch.randn(ROWS, LENGTH, WIDTH).double())


def difference(process_group: Any, model: nn.Module, styles: Any, *args: Tensor, layout: str = "2d") -> float:
    divided = copy.deepcopy(model)
    group = grouped(process_group, 4)
    grid = None if layout == "1d" else AxisGroups(group, TensorLayout.of("2d", 4))
    splits = split_model(divided, styles, group)
    expected = run(model, args, {}, DividedRandom(CPU, TensorGroup.counting(1)))
    results = run(divided, args, {}, DividedRandom(CPU, group))
    assert grid is group.grid
    return whole(results, splits).difference(expected)


@pytest.mark.parametrize("layout", ["1d", "2d"])
def test_dropouts_of_images_draw_the_masks_of_one_process(four: Ranks, layout: str) -> None:
    assert max(four.run(4, of_images, layout)) <= 1e-12


def of_images(process_group: Any, layout: str) -> float:
    torch.manual_seed(0)
    model = Calls(
        lambda own, x: own.end((y := own.begin(x)) + own.drop(own.down(own.drop(own.up(own.drop(y)))))),
        drop=nn.Dropout(0.5),
        **pair(),
    ).double()
    return difference(process_group, model, {**ENDS, **PAIR}, torch.randn(4, 3, 5, WIDTH).double(), layout=layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_without_eps_adds_that_of_torch(four: Ranks, dtype: torch.dtype) -> None:
    assert max(four.run(4, of_norm, dtype)) <= 1e-2


def of_norm(process_group: Any, dtype: torch.dtype) -> float:
    torch.manual_seed(0)
    model = Calls(lambda own, x: own.end(own.norm(own.begin(x))), norm=nn.RMSNorm(WIDTH, dtype=dtype))
    return difference(process_group, model, {**ENDS, "norm": "norm"}, (torch.randn(ROWS, WIDTH) / 1e2).to(dtype))


@pytest.mark.parametrize("layout", ["1d", "2d"])
def test_the_mean_loss_of_many_rows_of_float16_is_finite(four: Ranks, layout: str) -> None:
    for found, due in four.run(4, of_many_rows, layout):
        assert found == pytest.approx(due, rel=2e-3)


def of_many_rows(process_group: Any, layout: str) -> tuple[float, float]:
    torch.manual_seed(0)
    model = Calls(
        lambda own, x: own.loss(own.head(own.begin(x)), torch.zeros(len(x)).long()),
        head=nn.Linear(WIDTH, 8, dtype=torch.float16),
        loss=VocabularyCrossEntropy(),
    )
    x = torch.randn(4096, WIDTH).half() * 30
    due = float(functional.cross_entropy(model.get_submodule("head")(x).float(), torch.zeros(len(x)).long()).detach())
    group = grouped(process_group, 4)
    grid = None if layout == "1d" else AxisGroups(group, TensorLayout.of("2d", 4))
    split_model(model, {"begin": "begin", "head": "vocabulary"}, group)
    found = float(model(x).detach())
    assert grid is group.grid
    return found, due
