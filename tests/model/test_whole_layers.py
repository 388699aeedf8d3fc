"""Modules that are never cut: recognised by their code, or named with whole_layers=."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from pipesched import Pipeline, graph_of, profile, tune
from pipesched.errors import ExecutionError, GraphError, InputError
from pipesched.testing import reference_step
from tests.support.models import every_product_deferred
from tests.support.odd_models import FLOATS, Block, check, square

__all__ = ["every_product_deferred"]  # a fixture

pytestmark = [pytest.mark.usefixtures("every_product_deferred"), pytest.mark.timeout(120)]


class Recomputed(torch.autograd.Function):
    """Runs layers without a graph, and recomputes them in the backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[nn.Module]) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = y = x.detach().requires_grad_()
            for layer in ctx.layers:
                y = layer(y)
            y.backward(grad)
        return x.grad, None


class Pair(nn.Module):
    """Two layers inside one autograd.Function."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + Recomputed.apply(x, list(self.layers))


class Pairs(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.pairs = nn.Linear(8, 8), nn.ModuleList(Pair(dropout) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for pair in self.pairs:
            x = pair(x)
        return x


class Reversible(nn.Module):
    """Most layers are inside one autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Block(), nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Recomputed.apply(self.first(x), list(self.middle)))


@pytest.mark.smoke
def test_layers_within_a_function_that_has_its_own_backward_stay_together() -> None:
    check(Pairs, FLOATS)
    check(Reversible, FLOATS)
    assert list(graph_of(Pairs(), FLOATS[:2], measured=False)) == ["first", *(f"pairs.{n}" for n in range(4))]


@pytest.mark.smoke
def test_what_draws_in_a_backward_is_refused_in_a_pipeline_and_in_the_loop() -> None:
    options: dict[str, Any] = {"loss_fn": square, "seed": 5}
    message = r"random numbers must be drawn in forwards.* dropout was called during a backward"
    with pytest.raises(ExecutionError, match=message):
        Pipeline(Pairs(0.5), FLOATS[:2], devices=["cpu"] * 2, schedule="1f1b", **options)
    with pytest.raises(ExecutionError, match=message):
        reference_step(Pairs(0.5), FLOATS, target=FLOATS, num_microbatches=4, **options)


class Experts(nn.Module):
    """Sends tokens to experts; an expert without tokens is not called."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, count), nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        chosen, y = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens = torch.where(chosen == number)[0]
            if len(tokens):
                y = y.index_add(0, tokens, expert(x[tokens]))
        return x + y


class Sparse(nn.Module):
    def __init__(self, depth: int, experts: int = 3) -> None:
        super().__init__()
        parts = (nn.ModuleDict({"dense": Block(), "moe": Experts(experts)}) for _ in range(depth))
        self.first, self.blocks, self.last = Block(), nn.ModuleList(parts), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block["moe"](block["dense"](x))
        return self.last(x)


def test_experts_within_a_block_are_one_layer() -> None:
    check(lambda: Sparse(4), FLOATS)
    assert "blocks.2.moe" in graph_of(Sparse(4), FLOATS[:2], measured=False)


def test_a_way_that_depends_on_the_batch_names_the_module_to_keep_whole() -> None:
    torch.manual_seed(3)
    x = torch.where(torch.arange(8)[:, None] < 2, 5.0, -5.0).expand(8, 8)  # rows go to expert 1, then to expert 0
    options: dict[str, Any] = {"loss_fn": square, "num_microbatches": 4, "seed": 5}
    model = Sparse(1, experts=6)
    with torch.no_grad():
        model.blocks[0]["moe"].gate.weight.zero_()[1] = 1.0
        model.blocks[0]["moe"].gate.bias.zero_()
    with (
        Pipeline(model, x[:2], devices=["cpu"] * 2, schedule="1f1b", **options) as pipe,
        pytest.raises(GraphError, match=r"module 'blocks.0.moe' as one layer with whole_layers=\['blocks\.0\.moe'\]"),
    ):
        pipe.step(x, target=x)
    whole: dict[str, Any] = {**options, "whole_layers": ["blocks.0.moe"]}
    plain = Sparse(1, experts=6)
    plain.load_state_dict(model.state_dict())
    model.zero_grad()
    with Pipeline(model, x[:2], devices=["cpu"] * 3, schedule="zb-h1", **whole) as pipe:
        assert torch.equal(pipe.step(x, target=x), reference_step(plain, x, target=x, **whole))
        assert "blocks.0.moe" in [name for stage in pipe.plan.stages for name in stage]
    for own, due in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad is None if due.grad is None else torch.equal(own.grad, due.grad)
    options = {"whole_layers": ["blocks.0.moe"]}
    known = profile(model, FLOATS[:2], rows=[2], **options)
    plan = tune(model, FLOATS[:2], num_ranks=2, batch_size=8, profile=known, confirm=0, **options)
    assert "blocks.0.moe" in [name for stage in plan.stages for name in stage]


def test_layers_in_a_row_may_be_kept_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Linear(8, 8))
    assert list(graph_of(model, FLOATS, measured=False)) == ["0", "1.0", "1.1", "2"]
    assert list(graph_of(model, FLOATS, measured=False, whole_layers=["1"])) == ["0", "1", "2"]
    check(lambda: model, FLOATS, stages=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["block.0"], r"none of the model's \d+ modules is named 'block\.0'"),
        ("first", r"whole_layers must be a list of names of modules; got 'first'"),
        (["blocks"], r"'blocks' is a ModuleList, which is never called; pass its elements instead"),
        (["blocks.1"], r"'blocks\.1' is a ModuleDict, which is never called"),
    ],
)
def test_what_is_no_whole_layer_says_so(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Pipeline(Sparse(2), FLOATS, devices=["cpu"] * 2, loss_fn=square, whole_layers=given)


class Segments(nn.Module):
    """Calls torch's checkpoint_sequential, which recomputes all segments but the last."""

    def __init__(self, segments: int, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        self.segments, self.use_reentrant = segments, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(self.layers, self.segments, self.first(x), use_reentrant=self.use_reentrant)
        made: Tensor = self.last(x)
        return made


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    ("segments", "names"),
    [
        (1, ["layers.0", "layers.1", "layers.2", "layers.3"]),
        (2, ["layers.0", "layers.2", "layers.3"]),
        (4, ["layers.0", "layers.1", "layers.2", "layers.3"]),
    ],
)
def test_only_a_recomputed_segment_of_checkpoint_sequential_is_not_cut(
    segments: int, names: list[str], use_reentrant: bool
) -> None:
    make = functools.partial(Segments, segments, use_reentrant)
    assert list(graph_of(make(), FLOATS[:4], measured=False)) == ["first", *names, "last"]
    between = {"layers.1", "layers.2"} if use_reentrant and segments == 4 else set()
    for boundary in names:
        if boundary in between:
            with pytest.raises(GraphError, match=f"right before the one that calls {boundary}; pass use_reentr"):
                check(make, FLOATS, stages=2, boundaries=[boundary], schedules=["1f1b"])
        else:
            check(make, FLOATS, stages=2, boundaries=[boundary], schedules=["1f1b"])


class Rounded(torch.autograd.Function):
    """Rounds in the forward, and lets the gradient pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Loop(nn.Module):
    """Recomputes each layer; ``between`` is applied to the results, outside of torch's checkpoint."""

    def __init__(self, between: Any, use_reentrant: bool = True) -> None:
        super().__init__()
        self.layers, self.between = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), between
        self.first, self.last, self.use_reentrant = nn.Linear(8, 8), nn.Linear(8, 8), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.between(checkpoint(layer, x, use_reentrant=self.use_reentrant))
        made: Tensor = self.last(x)
        return made


@pytest.mark.one_in(24)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("boundary", ["layers.0", "layers.1", "layers.2", "layers.3", "last"])
@pytest.mark.parametrize("between", ["nothing", "product", "Function"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_stage_between_two_functions_is_right_or_refused(
    between: str, boundary: str, use_reentrant: bool, schedule: str
) -> None:
    """The result of another stage's Function has no gradient for torch if no input of this Function has one."""
    functions = {"nothing": lambda x: x, "product": lambda x: x * 2, "Function": Rounded.apply}
    inside = boundary.startswith("layers.") and boundary != "layers.0"
    refused = inside and (between == "Function" or (use_reentrant and between == "nothing"))
    make = functools.partial(Loop, functions[between], use_reentrant)
    with (
        pytest.raises(GraphError, match=r"must not begin between an autograd\.Function and another one")
        if refused
        else nullcontext()
    ):
        check(make, FLOATS, stages=2, boundaries=[boundary], schedules=[schedule])
